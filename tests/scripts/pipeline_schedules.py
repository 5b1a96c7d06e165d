"""Pipelines by torch.distributed.pipelining, times data and tensor parallelism. Nothing here knows of a launcher.

With `--ddp` the stages are wrapped for data parallelism, otherwise their gradients are reduced by hand.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """One stage, or a part of one."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--pp", type=int, default=2)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--schedule", choices=["gpipe", "1f1b", "interleaved"], default="1f1b")
parser.add_argument("--ddp", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
shape = (world // (args.pp * args.tp), args.pp, args.tp)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
replicas, place = mesh["dp"].get_group(), mesh["pp"].get_local_rank()

of_rank = 2 if args.schedule == "interleaved" else 1
numbers = [place + args.pp * turn for turn in range(of_rank)]
stages, models = [], []
for number in numbers:
    torch.manual_seed(number)
    model = Block(args.width)
    if args.tp > 1:
        model = parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if args.ddp:
        model = DistributedDataParallel(model, process_group=replicas)
    models.append(model)
    stages.append(PipelineStage(model, number, args.pp * of_rank, torch.device("cpu"), group=mesh["pp"].get_group()))


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


if args.schedule == "interleaved":
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_of)
elif args.schedule == "gpipe":
    schedule = ScheduleGPipe(stages[0], n_microbatches=4, loss_fn=loss_of)
else:
    schedule = Schedule1F1B(stages[0], n_microbatches=4, loss_fn=loss_of)

parameters = [parameter for model in models for parameter in model.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
batches = torch.Generator().manual_seed(10 + mesh["dp"].get_local_rank())

for step in range(args.steps):
    x = torch.randn(8, args.width, generator=batches)
    optimizer.zero_grad()
    losses = []
    if place == 0:
        schedule.step(x, target=x.sin(), losses=losses) if args.pp == 1 else schedule.step(x)
    elif place == args.pp - 1:
        schedule.step(target=x.sin(), losses=losses)
    else:
        schedule.step()
    for parameter in () if args.ddp else parameters:
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(gradient, group=replicas)
        gradient /= replicas.size()
    optimizer.step()
    shown = torch.stack(losses).mean().item() if losses else None
    print(f"[rank {rank}] step {step + 1} loss {shown!r}", flush=True)

weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in parameters]
digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in weights)).hexdigest()
print(f"[rank {rank}] sha256 model {digest}")
if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save([weight.detach().clone() for weight in weights], os.path.join(args.out, "final.pt"))
dist.destroy_process_group()
