"""An engine that shows its optimizer a part of the parameters at each of its steps, as DeepSpeed's ZeRO does.

--show groups       one parameter group at a time is in `param_groups` (ZeRO 1 and 2)
--show parameters   a group holds its parameters while they are stepped, and none otherwise (ZeRO 3)
"""

import os

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# own: each rank has a layer of its own, which it alone trains
args = arguments(show="groups", own=False)


class Engine:
    def __init__(self, groups):
        self.optimizer = torch.optim.AdamW(groups, lr=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.held = [group["params"] for group in self.optimizer.param_groups]
        if args.show == "parameters":
            for group in self.optimizer.param_groups:
                group["params"] = []

    def step(self):
        gradients = [[one.grad for one in held] for held in self.held]
        for number, held in enumerate(self.held):
            for group in self.held:
                for one in group:
                    one.grad = None
            for one, gradient in zip(held, gradients[number], strict=True):
                one.grad = gradient
            if args.show == "groups":
                whole = self.optimizer.param_groups
                self.optimizer.param_groups = [whole[number]]
                self.optimizer.step()
                self.optimizer.param_groups = whole
            else:
                self.optimizer.param_groups[number]["params"] = self.held[number]
                self.optimizer.step()
                self.optimizer.param_groups[number]["params"] = []
        self.schedule.step()


dist.init_process_group("gloo")
rank = dist.get_rank()
os.makedirs(args.out, exist_ok=True)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
torch.manual_seed(rank)
own = nn.Linear(8, 8) if args.own else nn.Identity()
matrices = [one for one in model.parameters() if one.ndim > 1]
vectors = [one for one in model.parameters() if one.ndim == 1]
engine = Engine([{"params": [*matrices, *own.parameters()], "weight_decay": 0.1}, {"params": vectors}])

for step in range(14):
    x = torch.randn(10, 8)
    loss = (own(model(x)) - x.flip(1)).square().mean()
    for one in (*model.parameters(), *own.parameters()):
        one.grad = None
    loss.backward()
    engine.step()
    print(f"[rank {rank}] step {step} loss {loss.item():.9f}", flush=True)

parts = [*model.parameters(), *own.parameters()]
finish(parts, args.out, model.module.state_dict())
