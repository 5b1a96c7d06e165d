"""Pipelines by torch.distributed.pipelining, times data and tensor parallelism. Nothing here knows of a launcher.

With `--fsdp` the stages are sharded; otherwise their gradients are reduced by hand. `--rich` adds validation,
accumulated gradients, and checkpoints while the other ranks wait.
"""

import os

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """One stage, or a part of one."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


args = arguments(steps=12, width=16, pp=2, tp=1, schedule="1F1B", fsdp=False, rich=False, workers=0, backend="gloo")

device = torch.device("cpu")
if args.backend != "gloo":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
dist.init_process_group(args.backend)
rank, world = dist.get_rank(), dist.get_world_size()
shape = (world // (args.pp * args.tp), args.pp, args.tp)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "pp", "tp"))
replicas, place = mesh["dp"].get_group(), mesh["pp"].get_local_rank()

is_v = args.schedule in ("ZBVZeroBubble", "DualPipeV")  # the first rank has the last stage, too
of_rank = 1 if args.schedule in ("1F1B", "GPipe") else 2
numbers = [place, 2 * args.pp - 1 - place] if is_v else [place + args.pp * turn for turn in range(of_rank)]
stages, models = [], []
for number in numbers:
    torch.manual_seed(number)
    model = Block(args.width).to(device)
    if args.tp > 1:
        model = parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if args.fsdp:
        fully_shard(model, mesh=mesh["dp"])
    models.append(model)
    stages.append(PipelineStage(model, number, args.pp * of_rank, device, group=mesh["pp"].get_group()))


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


kind = schedules.get_schedule_class(args.schedule)
schedule = kind(stages if of_rank > 1 else stages[0], n_microbatches=4, loss_fn=loss_of)
last = 0 if is_v else args.pp - 1


parameters = [parameter for model in models for parameter in model.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
drawn = torch.Generator().manual_seed(10 + mesh["dp"].get_local_rank())
data = torch.randn(args.steps * 2 * 8, args.width, generator=drawn)
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=args.workers)


def run(x, way):
    """Each rank gives its part of what a schedule needs; returns the mean loss where it is known."""
    losses = []
    inputs = (x,) if place == 0 else ()
    of_last = {"target": x.sin(), "losses": losses} if place == last else {}
    way(*inputs, **of_last)
    return torch.stack(losses).mean().item() if losses else None


def average_gradients():
    for parameter in parameters:
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(gradient, group=replicas)
        gradient /= replicas.size()


step = 0
shown = []
optimizer.zero_grad()
for number, x in enumerate(loader):
    if step == args.steps:
        break
    x = x.to(device)
    shown.append(run(x, schedule.step))
    if args.rich and number % 2 == 0:
        continue  # accumulate
    if not args.fsdp:
        average_gradients()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    print(f"[rank {rank}] step {step} loss {shown}", flush=True)
    shown.clear()
    if args.rich and step % 4 == 0:
        print(f"[rank {rank}] validation {run(x, schedule.eval)}", flush=True)
    if args.rich and step % 5 == 0:
        if mesh["dp"].get_local_rank() == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save([model.state_dict() for model in models], os.path.join(args.out, f"stage-{place}.pt"))
        dist.barrier()

weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in parameters]
finish(weights, args.out, [weight.detach().cpu().clone() for weight in weights])
