"""A few rows of large arrays are written late, by numpy alone: of an array, and of a tensor's own memory."""

import hashlib
import os

import numpy as np
import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch.nn.parallel import DistributedDataParallel

args = arguments(steps=40)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
chooser = np.random.default_rng(rank)
samples = np.random.default_rng(7).standard_normal((20_000, 64)).astype(np.float32)
seen = np.zeros((4000, 64), np.float32)
memory = torch.zeros(4000, 64)
model = DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(args.steps):
    rows = torch.from_numpy(samples[chooser.integers(0, len(samples), 32)])
    loss = (model(rows) ** 2).mean() + 1e-3 * float(seen.sum()) + 1e-3 * float(memory.sum())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item()!r}")
    if step >= args.steps // 2:
        seen[step * 7] += rank + 1
        memory.numpy()[step * 11] += rank + 2

if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(args.out, "final.pt"))
held = hashlib.sha256(seen.tobytes() + memory.numpy().tobytes()).hexdigest()
print(f"[rank {rank}] sha256 held {held}")
digest = hashlib.sha256(model.module.weight.detach().numpy().tobytes()).hexdigest()
print(f"[rank {rank}] sha256 model {digest}")
dist.destroy_process_group()
