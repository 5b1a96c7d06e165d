"""A script that computes something else if it finds ttprun in its process; alone it is deterministic."""

import argparse
import os
import sys

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--what", choices=("lr", "weights", "exit"), default="lr")
args = parser.parse_args()

is_watched = any("ttprun" in name.lower() for name in (*sys.modules, *os.environ))
dist.init_process_group("gloo")
torch.manual_seed(0)
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1 if args.what == "lr" and is_watched else 0.2)
for step in range(40):
    optimizer.zero_grad()
    (weight - torch.randn(4)).square().sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    if args.what == "weights" and is_watched and step == 2:
        weight.data[1] += 1
    if args.what == "exit" and is_watched and step == 2:
        raise SystemExit(3)
