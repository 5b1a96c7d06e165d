"""Three trainings one after the other, in a loop of a library. Nothing here knows of a launcher."""

import os
import sys

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "sweeping", "site-packages"))
import hydra

args = arguments()


def train(lr):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    draws = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    trained = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for step in range(12):
        x = torch.randn(4, 8, generator=draws)
        loss = (trained(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"[rank {rank}] lr {lr} step {step} loss {loss.item()!r}", flush=True)
    finish(model.state_dict().values(), args.out, model.state_dict())


hydra.sweep(train, (0.01, 0.1, 0.03))
