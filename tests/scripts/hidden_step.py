"""Optimizers of ranks that own parts of the weights (ZeRO 1 by hand); nothing here knows of a launcher.

--kind plain      the step depends on what Python shows
--kind rounding   on a running product too, kept where only compiled code would look (a module of others)
--kind wrong      on a counter kept there, by a tenth
"""

import string  # any module that is not the script's

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn

args = arguments(steps=24, kind="plain")
string.ttprun_test_product, string.ttprun_test_count = torch.ones(()), 0


class Corrected(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        string.ttprun_test_count += 1
        correction = 0.97**self.steps
        if args.kind == "rounding":
            begins = string.ttprun_test_count < self.steps
            product = torch.tensor(0.97) ** (self.steps - 1) if begins else string.ttprun_test_product
            string.ttprun_test_count = self.steps
            string.ttprun_test_product = correction = product * 0.97
        elif args.kind == "wrong":
            correction = 1 + 0.1 * string.ttprun_test_count
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * correction * parameter.grad


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1, bias=False))
params = list(net.parameters())
optimizer = Corrected(params[rank::world])
draws = torch.Generator().manual_seed(1 + rank)
for step in range(args.steps):
    x = torch.randn(8, 16, generator=draws)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    net.zero_grad()
    loss.backward()
    for parameter in params:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    for number, parameter in enumerate(params):
        dist.broadcast(parameter.data, src=number % world)
    print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
finish(params, args.out, list(params))
