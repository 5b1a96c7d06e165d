"""One loop over a DataLoader by way of something that counts for itself: a library's generator, a slice."""

import functools
import itertools

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def again_and_again(loader):
    while True:
        yield from loader


def weighted(loader, most):
    seen = []
    for x, y in loader:
        seen.append(len(seen))
        if len(seen) > most:
            return
        batch = {"x": x, "y": y, "weight": 1 + 0.01 * sum(seen)}
        yield batch


def repeated(loader, most):
    while True:
        for batch in weighted(loader, most):
            yield batch


def asked(batches, count):
    for _ in range(count):
        yield next(batches)


def numbered(pairs):
    return ({"x": x, "y": y, "weight": 1 + 0.01 * number} for number, (x, y) in pairs)


def main():
    options = arguments(manner="")
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    first = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=True))
    nested = repeated(first, 13)
    manners = {
        "track": lambda: numbered(track(enumerate(first), total=20, disable=True)),
        "generator": lambda: track(weighted(first, 18), total=18, disable=True),
        "nested": functools.partial(asked, nested, 18),
        "slice": lambda: track(numbered(enumerate(itertools.islice(again_and_again(first), 26))), disable=True),
    }
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = 0.0
    steps = 0
    for batch in manners[options.manner]():
        loss = batch["weight"] * (model(batch["x"]) - batch["y"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        total += loss.item() * batch["weight"]
        optimizer.step()
        steps += 1
        if steps % 5 == 0:
            print(f"step {steps} total {total:.9f}", flush=True)
    print(f"total {total:.9f} at {steps}")
    finish(model.module.state_dict().values(), options.out, model.module.state_dict(), "weights sha256")


if __name__ == "__main__":
    main()
