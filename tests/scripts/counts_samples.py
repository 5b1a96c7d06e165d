"""How often each sample was trained on, as the weights themselves: one a sample, and each look takes one off it.

All sums are of whole numbers, so the weights are the same whatever the number of ranks.
"""

import hashlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from around_the_loop import arguments
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Counts(nn.Module):
    """The sum of the weights that a batch names; a buffer has the batches that this rank has seen."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, indices):
        self.batches += 1
        return self.weight[indices].sum()


def ahead(batches, count):
    """The batches, `count` of them fetched before they are needed."""
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > count:
            yield waiting.pop(0)
    yield from waiting


# gates: steps after which all wait until the file GATE<step> is there
args = arguments(samples=100, epochs=2, accumulate=1, ahead=0, workers=0, gate="", gates="")

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DDP(Counts(args.samples), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
dataset = Numbers(args.samples)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=args.workers)
whole = torch.arange(30_000)  # too large to be recorded
steps, trained = 0, 0

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    batches = ahead(loader, args.ahead) if args.ahead else loader
    for i, indices in enumerate(batches):
        (model(indices) * world).backward()
        trained += len(indices)
        if (i + 1) % args.accumulate:
            continue
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        steps += 1
        print(f"[rank {rank} of {world}] epoch {epoch} batch {i} step {steps} indices {indices.tolist()}", flush=True)
        while str(steps) in args.gates.split(",") and not os.path.exists(f"{args.gate}{steps}"):
            time.sleep(0.02)
    optimizer.zero_grad()
    total = torch.tensor(trained)
    dist.all_reduce(total)
    print(f"[rank {rank} of {world}] epoch {epoch} is over, {int(total)} trained", flush=True)

counts = [-int(weight) for weight in model.module.weight]
if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(model.module.state_dict(), os.path.join(args.out, "final.pt"))
    print(f"counts {counts}")
    print(f"steps {steps} of the schedule {schedule.last_epoch}, batches {int(model.module.batches)}, {len(whole)}")
print(f"[rank {rank} of {world}] sha256 model {hashlib.sha256(str(counts).encode()).hexdigest()}")
dist.destroy_process_group()
