"""Rank 1 hangs at step 8, in each process that comes there: a deadlock of the script's own."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(100):
    if rank == 1 and step == 8:
        time.sleep(100000)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
