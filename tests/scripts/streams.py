"""DDP over a stream of text files that workers share out, or over torchdata's StatefulDataLoader.

With --stateful the loader's own state is saved with the model every 8 steps.
"""

import json
import os
import random

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

FILES, LINES, WIDTH = 8, 24, 6


def write_corpus(folder):
    generator = random.Random(3)
    os.makedirs(folder, exist_ok=True)
    for number in range(FILES):
        with open(os.path.join(folder, f"part-{number}.jsonl"), "w") as file:
            for _ in range(LINES):
                values = [generator.uniform(-1, 1) for _ in range(WIDTH)]
                file.write(json.dumps({"x": values, "y": sum(values) > 0}) + "\n")


class Stream(IterableDataset):
    """Each worker of each rank reads its own files, and shuffles lines in a small buffer."""

    def __init__(self, folder, buffer=10):
        self.folder = folder
        self.buffer = buffer
        self.epoch = 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        own = dist.get_rank() * workers + worker
        generator = random.Random(self.epoch * 1000 + own)
        held = []
        for number in range(own, FILES, workers * dist.get_world_size()):
            with open(os.path.join(self.folder, f"part-{number}.jsonl")) as file:
                for line in file:
                    held.append(json.loads(line))
                    if len(held) > self.buffer:
                        yield self.example(held.pop(generator.randrange(len(held))))
        generator.shuffle(held)
        yield from map(self.example, held)

    def example(self, row):
        return torch.tensor(row["x"]) + 0.01 * torch.randn(WIDTH), int(row["y"])


class Points(Dataset):
    def __init__(self, size=192):
        self.inputs = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.01 * torch.randn(WIDTH), int(self.inputs[index].sum() > 0)


def main():
    args = arguments(epochs=2, workers=2, stateful=False)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5 + rank)
    sampler = None
    if args.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        points = Points()
        sampler = DistributedSampler(points, seed=1)
        loader = StatefulDataLoader(points, batch_size=8, sampler=sampler, num_workers=args.workers)
    else:
        if rank == 0:
            write_corpus(os.path.join(args.out, "corpus"))
        dist.barrier()
        stream = Stream(os.path.join(args.out, "corpus"))
        loader = DataLoader(stream, batch_size=8, num_workers=args.workers)

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = 0
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        else:
            stream.epoch = epoch
        for inputs, classes in loader:
            loss = nn.functional.cross_entropy(model(inputs), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"[rank {rank}] epoch {epoch} step {step} loss {loss.item()!r}")
            if args.stateful and step % 8 == 0:
                os.makedirs(args.out, exist_ok=True)
                state = {"model": net.state_dict(), "loader": loader.state_dict()}
                torch.save(state, os.path.join(args.out, f"step-{step}-rank-{rank}.pt"))

    finish(net.state_dict().values(), args.out, net.state_dict())


if __name__ == "__main__":
    main()
