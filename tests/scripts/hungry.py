"""A small training; with --appetite FILE, rank 1 takes memory without end in step 8, unless FILE is there already.

torchrun --nproc-per-node 2 hungry.py --out DIR [--appetite FILE]
"""

import os

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish

args = arguments(appetite="")


def eat() -> None:
    os.close(os.open(args.appetite, os.O_CREAT))
    eaten = []
    while True:
        eaten.append(bytearray(b"x" * (16 << 20)))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
weight = torch.ones(64, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9)
for step in range(20):
    optimizer.zero_grad()
    (weight * torch.randn(64)).sum().square().backward()
    dist.all_reduce(weight.grad)
    if step == 8 and rank == 1 and args.appetite and not os.path.exists(args.appetite):
        eat()
    optimizer.step()
    print(f"[rank {rank}] step {step}")
finish([weight], args.out, weight)
