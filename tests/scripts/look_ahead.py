"""Iterators of the script's own that read ahead of the steps: the loader ends before its last batch is trained on."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS_AN_EPOCH, EPOCHS, BATCH = 5, 4, 4


class Shard:
    """Reads one batch ahead to know which one is the last, in the manner of accelerate's DataLoaderShard."""

    def __init__(self, loader):
        self.loader = loader
        self.iteration = 0
        self.end_of_dataloader = False

    def __iter__(self):
        self.end_of_dataloader = False
        self.loader.sampler.set_epoch(self.iteration)
        dataloader_iter = iter(self.loader)
        try:
            current_batch = next(dataloader_iter)
        except StopIteration:
            return
        batch_index = 0
        while True:
            try:
                next_batch = next(dataloader_iter)
                yield current_batch
                batch_index += 1
                current_batch = next_batch
            except StopIteration:
                self.end_of_dataloader = True
                yield current_batch
                break
        self.iteration += 1


class OneBehind(Shard):
    """The same with a `for` loop, which lets go of the loader's iterator when that has ended."""

    def __iter__(self):
        self.end_of_dataloader = False
        self.loader.sampler.set_epoch(self.iteration)
        held = None
        for batch in self.loader:
            if held is not None:
                yield held
            held = batch
        self.end_of_dataloader = True
        yield held
        self.iteration += 1


class Fetcher(Shard):
    """The same with `__next__` and no generator."""

    def __iter__(self):
        self.end_of_dataloader = False
        self.loader.sampler.set_epoch(self.iteration)
        self.items = iter(self.loader)
        self.ahead = [next(self.items)]
        return self

    def __next__(self):
        if not self.ahead:
            self.iteration += 1
            raise StopIteration
        batch = self.ahead.pop()
        try:
            self.ahead.append(next(self.items))
        except StopIteration:
            self.end_of_dataloader = True
        return batch


def main():
    args = arguments(reader=["shard", "one-behind", "fetcher"], asked_by=["next", "for"])

    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(5)
    features = torch.randn(BATCH * STEPS_AN_EPOCH * world_size, 8)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    reader = {"shard": Shard, "one-behind": OneBehind, "fetcher": Fetcher}[args.reader](loader)
    own = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    model = DDP(own)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    losses = []

    def train_on(batch, epoch):
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"[rank {rank}] epoch {epoch} step {len(losses)} loss {loss.item()!r} {reader.end_of_dataloader}")

    for epoch in range(EPOCHS):
        if args.asked_by == "for":
            for batch in reader:
                train_on(batch, epoch)
            continue
        batches = iter(reader)
        for _ in range(STEPS_AN_EPOCH):
            batch = next(batches)
            train_on(batch, epoch)
        assert next(batches, None) is None

    dist.barrier()
    finish(own.state_dict().values(), args.out, own.state_dict())


if __name__ == "__main__":
    main()
