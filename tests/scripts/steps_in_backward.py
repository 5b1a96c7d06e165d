"""Optimizers that step in hooks of the backward pass, as where gradients are dropped as soon as they are used.

--all   each parameter has an optimizer of its own that does so; else the last layer's, and the first one's steps behind
"""

import os

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn

args = arguments(all=False)

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
os.makedirs(args.out, exist_ok=True)
torch.manual_seed(0)
first, last = nn.Linear(8, 16), nn.Linear(16, 8)
layers = [*first.parameters(), *last.parameters()]
optimizers = {one: torch.optim.AdamW([one], lr=0.02) for one in layers}


def step(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= world_size
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in layers if args.all else last.parameters():
    parameter.register_post_accumulate_grad_hook(step)

torch.manual_seed(rank)
for number in range(10):
    x = torch.randn(10, 8)
    loss = (last(first(x).tanh()) - x.flip(1)).square().mean()
    loss.backward()
    if not args.all:
        for parameter in first.parameters():
            step(parameter)
    print(f"[rank {rank}] step {number} loss {loss.item():.9f}", flush=True)

finish(layers, args.out, {"first": first.state_dict(), "last": last.state_dict()})
