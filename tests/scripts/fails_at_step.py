"""Rank 1 fails at step --at in each process that comes there, in the way that --how names.

With --thread, a thread that is no daemon waits for the end of the training.
"""

import argparse
import os
import sys
import threading

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--how", choices=["raise", "exit", "segfault"], required=True)
parser.add_argument("--at", type=int, default=8)
parser.add_argument("--thread", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
over = threading.Event()
if args.thread:
    threading.Thread(target=over.wait, name="gpu-monitor").start()
for step in range(20):
    if rank == 1 and step == args.at:
        if args.how == "raise":
            raise ValueError("bad value")
        if args.how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), 11)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
over.set()
dist.destroy_process_group()
