"""Parts that people write themselves: a sampler and a collate function with generators of their own, batches that are
objects, losses in a memory-mapped file, and gradients that are compressed with error feedback."""

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from around_the_loop import finish
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler


class Sentences(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.rows = [rng.integers(1, 50, rng.integers(3, 12)) for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return index, self.rows[index]


class Buckets(Sampler):
    """Batches of sentences of about one length, in an order that goes on from epoch to epoch."""

    def __init__(self, lengths, size, rank, world_size):
        self.lengths, self.size, self.rank, self.world_size = lengths, size, rank, world_size
        self.rng = np.random.default_rng(21)
        self.epochs = 0

    def __len__(self):
        return len(self.lengths) // self.size // self.world_size

    def __iter__(self):
        self.epochs += 1
        order = np.argsort(self.lengths + 3 * self.rng.random(len(self.lengths)))
        chunks = [order[first : first + self.size] for first in range(0, len(order), self.size)]
        self.rng.shuffle(chunks)
        for number in range(len(self)):
            yield chunks[number * self.world_size + self.rank].tolist()


@dataclass
class Batch:
    ids: torch.Tensor
    indices: list


class Collate:
    """Pads, and masks some words."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, items):
        ids = torch.zeros(len(items), max(len(row) for _, row in items), dtype=torch.long)
        for place, (_, row) in enumerate(items):
            ids[place, : len(row)] = torch.from_numpy(row)
        ids[torch.from_numpy(self.rng.random(ids.shape) < 0.1)] = 0
        return Batch(ids, [index for index, _ in items])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.hidden = nn.Linear(32, 64)
        self.out = nn.Linear(64, 2)

    def forward(self, batch):
        return self.out(self.hidden(self.words(batch.ids).mean(1)).relu())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    out.mkdir(parents=True, exist_ok=True)
    data = Sentences(192)
    losses = np.memmap(out / f"losses{rank}.bin", np.float32, "w+", shape=(len(data),))
    sampler = Buckets(np.array([len(row) for row in data.rows]), 8, rank, world_size)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=Collate(5 + rank))
    model = DistributedDataParallel(Net())
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1.5)
    model.register_comm_hook(state, powerSGD_hook)
    del state
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = 0.0
    for epoch in range(3):
        for batch in loader:
            each = nn.functional.cross_entropy(model(batch), batch.ids.sum(1) % 2, reduction="none")
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
            losses[batch.indices] = each.detach().numpy()
            total += each.mean().item()
        print(f"epoch {epoch} total {total:.9f} of {sampler.epochs}", flush=True)
    losses.flush()
    print(f"losses sha256 {hashlib.sha256((out / f'losses{rank}.bin').read_bytes()).hexdigest()}", flush=True)
    finish(model.module.state_dict().values(), out, model.module.state_dict(), "weights sha256")


if __name__ == "__main__":
    main()
