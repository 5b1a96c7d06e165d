"""One loop over iterators that are made of others: zip, islice, count, and generators that begin a loader again."""

import argparse
import hashlib
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
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
    state = model.module.state_dict()
    weights = b"".join(value.numpy().tobytes() for value in state.values())
    print(f"weights sha256 {hashlib.sha256(weights).hexdigest()}", flush=True)
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        torch.save(state, out / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
