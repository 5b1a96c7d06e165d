"""A script with an error of its own, which one rank meets in step 5 whenever it gets there.

torchrun --nproc-per-node 2 fails_in_step.py --out DIR [--late]
"""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--late", action="store_true", help="after the step's collective, not before it")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    weight.square().sum().backward()
    if step == 5 and rank == 1 and not args.late:
        raise ValueError("the fifth batch has no labels")
    dist.all_reduce(weight.grad)
    if step == 5 and rank == 1:
        raise ValueError("the fifth batch has no labels")
    optimizer.step()
dist.destroy_process_group()
