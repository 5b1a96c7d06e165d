"""Rank 1 fails at step 8 in each process that comes there, in the way that --how names; a line is written each time."""

import argparse
import os
import sys

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--how", choices=["raise", "exit", "segfault"], required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(20):
    if rank == 1 and step == 8:
        if args.how == "raise":
            raise ValueError("bad value")
        if args.how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), 11)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
