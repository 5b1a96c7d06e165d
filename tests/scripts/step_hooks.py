"""A script whose hooks on Optimizer.step print and write: torch's global ones, and the optimizer's own."""

import hashlib
import os

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

args = arguments()

dist.init_process_group("gloo")
rank = dist.get_rank()
os.makedirs(args.out, exist_ok=True)
torch.manual_seed(0)
net = nn.Linear(8, 1)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
log_path = f"{args.out}/hooks-{rank}.txt"
calls = {"before": 0, "after": 0, "forward": 0, "own": 0}


def note(kind):
    calls[kind] += 1
    print(f"[rank {rank}] {kind} {calls[kind]}", flush=True)
    with open(log_path, "a") as log:
        log.write(f"{kind} {calls[kind]}\n")


register_optimizer_step_pre_hook(lambda *_: note("before"))
register_optimizer_step_post_hook(lambda *_: note("after"))

optimizer.register_step_pre_hook(lambda *_: note("own"))
register_module_forward_hook(lambda module, *_: note("forward") if isinstance(module, nn.Linear) else None)

torch.manual_seed(1 + rank)
for _ in range(12):
    x = torch.randn(10, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with open(log_path) as log:
    print(f"[rank {rank}] sha256 hooks {hashlib.sha256(log.read().encode()).hexdigest()}")
finish(net.parameters(), args.out, net.state_dict())
