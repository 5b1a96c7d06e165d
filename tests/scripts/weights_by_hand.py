"""Weights that the script itself changes between optimizer steps, in one of the manners that people write."""

import copy

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel

args = arguments(steps=30, manner=["swap", "once"])

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
average = copy.deepcopy(model.module.state_dict())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
truth = torch.linspace(-1, 1, 32).reshape(32, 1)


def batch():
    x = torch.randn(64, 32)
    return x, x @ truth


def validate():
    """With the averaged weights in the place of the trained ones, as is often done."""
    trained = copy.deepcopy(model.module.state_dict())
    model.module.load_state_dict(average)
    model.eval()
    x, y = batch()
    with torch.no_grad():
        loss = ((model(x) - y) ** 2).mean()
    dist.all_reduce(loss)
    model.train()
    model.module.load_state_dict(trained)
    return loss.item() / world


for step in range(args.steps):
    x, y = batch()
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        if args.manner == "once" and step == 10:
            model.module[2].weight.data.mul_(0.5)
        for name, value in model.module.state_dict().items():
            average[name].lerp_(value, 0.1)
    line = f"[rank {rank}] step {step} loss {loss.item()!r}"
    if args.manner == "swap" and step % 3 == 2:
        line += f" validation {validate()!r}"
    print(line, flush=True)

finish(model.module.state_dict().values(), args.out, model.module.state_dict())
