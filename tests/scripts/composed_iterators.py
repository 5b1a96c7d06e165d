"""One loop over iterators that are made of others: zip, islice, count, and generators that begin a loader again."""

import itertools

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def again_and_again(loader):
    while True:
        yield from loader


def repeated(loader):
    while True:
        for batch in loader:
            yield batch


def main():
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    labelled = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    others = TensorDataset(torch.randn(60, 8))
    first = DataLoader(labelled, batch_size=8, sampler=DistributedSampler(labelled, shuffle=True))
    second = DataLoader(others, batch_size=5, shuffle=True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = 0.0
    for number, (x, y), (z,) in itertools.islice(zip(itertools.count(1), repeated(first), again_and_again(second)), 30):
        loss = (model(x) - y).square().mean() + 0.01 * number * model(z).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * number
        if number % 5 == 0:
            print(f"step {number} total {total:.9f}", flush=True)
    for index, (x, y) in zip(range(5, 50), first):
        loss = index * (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * index
    print(f"total {total:.9f} at {number}, {index}")
    finish(model.module.state_dict().values(), args.out, model.module.state_dict(), "weights sha256")


if __name__ == "__main__":
    main()
