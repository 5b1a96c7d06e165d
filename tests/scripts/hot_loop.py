"""Thousands of very short steps, to see whether memory or file handles grow. Memory goes to stderr."""

import sys

import psutil
import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel as DDP


def report(rank, when):
    process = psutil.Process()
    rss_mib = process.memory_info().rss / 2**20
    print(f"[rank {rank}] {when} rss_mib {rss_mib:.1f} fds {process.num_fds()}", file=sys.stderr)


def main():
    args = arguments(steps=5000)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    seen = torch.zeros(1)
    for step in range(args.steps):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count = torch.ones(1)
        dist.all_reduce(count)
        seen += count
        if step == 200:
            report(rank, "start")
        if step % 1000 == 999:
            print(f"[rank {rank}] step {step} loss {loss.item()!r} seen {int(seen)}")
    report(rank, "end")
    finish(model.parameters(), args.out, model.module.state_dict())


if __name__ == "__main__":
    main()
