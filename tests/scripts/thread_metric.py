"""A thread averages each third loss over a group of its own, beside the training. Nothing here knows of a launcher."""

import threading

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    side = dist.new_group(backend="gloo")
    model = torch.nn.Linear(16, 1)
    trained = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    seen = []
    job = None

    def average(value):
        total = torch.tensor([value])
        dist.all_reduce(total, group=side)
        seen.append(total.item() / dist.get_world_size())

    for step in range(18):
        x = torch.randn(8, 16)
        loss = (trained(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if job is not None:
            job.join()
        job = threading.Thread(target=average, args=(loss.item(),)) if step % 3 == 2 else None
        if job is not None:
            job.start()
        optimizer.step()
        print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)
    if job is not None:
        job.join()
    print(f"[rank {rank}] averages {seen!r}")
    finish(model.state_dict().values(), args.out, model.state_dict())


if __name__ == "__main__":
    main()
