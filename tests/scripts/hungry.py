"""A small training; with --appetite FILE, rank 1 takes memory without end in step 8, unless FILE is there already.

torchrun --nproc-per-node 2 hungry.py --out DIR [--appetite FILE]
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--appetite", type=Path)
args = parser.parse_args()


def eat() -> None:
    args.appetite.write_text("eaten")
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
    if step == 8 and rank == 1 and args.appetite is not None and not args.appetite.exists():
        eat()
    optimizer.step()
    print(f"[rank {rank}] step {step}")
print(f"[rank {rank}] sha256 {hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()}")
dist.destroy_process_group()
