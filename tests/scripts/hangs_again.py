"""Rank 1 comes to a call of its own at step 8, in each process, or leaves the loop there and waits in another place."""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--group-limit-s", type=int, default=1800)
parser.add_argument("--pipe", help="a named pipe that it reads; else it sleeps without end")
parser.add_argument("--leaves-loop", action="store_true")
args, _ = parser.parse_known_args()

dist.init_process_group("gloo", timeout=timedelta(seconds=args.group_limit_s))
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(40):
    if rank == 1 and step == 8 and args.leaves_loop:
        break
    if rank == 1 and step == 8:
        open(args.pipe).read() if args.pipe else time.sleep(100000)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
