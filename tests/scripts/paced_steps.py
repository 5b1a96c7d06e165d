"""A small model under DDP with dropout, 60 steps that take a tenth of a second each; every line has its time."""

import os
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch.nn.parallel import DistributedDataParallel

args = arguments(pace=0.1)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for step in range(60):
    x = torch.randn(64, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item()!r} at {time.monotonic():.3f}", flush=True)
    time.sleep(args.pace)

if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(net.state_dict(), os.path.join(args.out, "final.pt"))
dist.destroy_process_group()
