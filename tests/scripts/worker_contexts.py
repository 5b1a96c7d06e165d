"""DataLoader workers that draw random numbers, started in a way of --context. Nothing here knows of a launcher."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.rand(1), x.sum()


def main():
    args = arguments(context="forkserver", persistent=False, stateful=False)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    sampler = DistributedSampler(Points(), seed=3)
    make = DataLoader
    if args.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        make = StatefulDataLoader
    loader = make(
        *(Points(), 4),
        sampler=sampler,
        num_workers=1,
        multiprocessing_context=args.context,
        persistent_workers=args.persistent,
    )
    model = nn.Linear(8, 1)
    trained = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (trained(x).squeeze() - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)
            step += 1
    finish(model.state_dict().values(), args.out, model.state_dict())


if __name__ == "__main__":
    main()
