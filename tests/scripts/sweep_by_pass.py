"""Five trainings one after the other, each with a model of its own, some of them pruned.

torchrun --nproc-per-node 2 sweep_by_pass.py --out DIR FORM
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("form", choices=["counted"])
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
scores: list[float] = []
steps = number = 0


class Pruned(Exception):
    pass


def train(number: int) -> None:
    global model, steps
    torch.manual_seed(number)
    model = DistributedDataParallel(torch.nn.Linear(8, 8 + number))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01 * (number + 1))
    for step in range(1, 9):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        print(f"[rank {rank}] trial {number} step {steps} loss {loss.item()!r}", flush=True)
        if number % 2 and step == 5:
            raise Pruned
    scores.append(loss.item())


def attempt(number: int) -> None:
    try:
        train(number)
    except Pruned:
        scores.append(1.0)


while number < 5:
    attempt(number)
    number += 1
if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save((scores, model.module.state_dict()), os.path.join(args.out, "final.pt"))
dist.destroy_process_group()
