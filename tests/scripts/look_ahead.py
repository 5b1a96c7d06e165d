"""Iterators of the script's own that read ahead of the steps: the loader ends before its last batch is trained on."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--reader", default="shard", choices=["shard", "one-behind", "fetcher"])
    parser.add_argument("--asked-by", default="next", choices=["next", "for"])
    args = parser.parse_args()

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

    weights = hashlib.sha256()
    for name, value in own.state_dict().items():
        weights.update(name.encode() + value.numpy().tobytes())
    print(f"[rank {rank}] sha256 model {weights.hexdigest()}")
    if rank == 0:
        torch.save(own.state_dict(), os.path.join(args.out, "final.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
