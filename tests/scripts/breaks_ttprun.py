"""Breaks a part of ttprun in its own process, as a bug of ttprun's would, and trains: 20 steps of DDP."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel

args = arguments(part=["nothing", "group", "step"])


def broken(*args, **kwargs):
    raise ArithmeticError("a bug of ttprun's")


if args.part == "group":
    from ttprun.groups import process_group

    process_group.ManagedGroup.__init__ = broken
if args.part == "step":
    from ttprun.rank.step import step_hooks

    step_hooks._begin_step = broken

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(160.0).reshape(40, 4) / 160 + dist.get_rank())
for batch in torch.utils.data.DataLoader(data, batch_size=2, shuffle=True):
    optimizer.zero_grad()
    model(batch[0]).mean().backward()
    optimizer.step()
finish(model.parameters(), args.out, model.module.state_dict())
