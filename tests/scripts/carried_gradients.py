"""Ranks whose backward passes add to gradients that a step has used. Nothing here knows of a launcher.

--what gan      the generator learns through the discriminator, whose old gradients are zeroed afterwards
--what never    one model; zero_grad() is never called
--what sharded  the same with FSDP2
--what by-hand  the same; gradients are averaged by hand, in the order of the parameters
--what damped   never zeroed; the script scales them by hand after each step
"""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP

args = arguments(steps=12, what="gan")

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, n_out))


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def damp(model):
    scale(model, 0.9)


def scale(model, factor):
    """Not called by the loop itself, whose code does not show what becomes of the gradients."""
    for parameter in model.parameters():
        parameter.grad *= factor


def end(*models):
    values = [value for model in models for value in model.state_dict().values()]
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    print(f"[rank {rank}] draw {torch.rand(()).item()!r}")
    finish(whole, args.out, whole)


def train_gan():
    generator, judge = mlp(4, 10), mlp(10, 1)
    g_model, d_model = DDP(generator), DDP(judge)
    g_opt = torch.optim.Adam(generator.parameters(), 1e-2)
    d_opt = torch.optim.Adam(judge.parameters(), 1e-2)
    torch.manual_seed(10 + rank)
    for step in range(args.steps):
        d_opt.zero_grad()
        with torch.no_grad():
            fake = generator(torch.randn(16, 4))
        d_loss = softplus(-d_model(torch.randn(16, 10).sin())).mean() + softplus(d_model(fake)).mean()
        d_loss.backward()
        d_opt.step()

        g_opt.zero_grad()
        g_loss = softplus(-d_model(g_model(torch.randn(16, 4)))).mean()
        g_loss.backward()
        norm = sum(parameter.grad.norm() for parameter in judge.parameters())
        g_opt.step()
        print(f"[rank {rank}] step {step} losses {d_loss.item()!r} {g_loss.item()!r} norm {norm.item()!r}", flush=True)
    end(generator, judge)


def train_without_zeroing():
    model = mlp(8, 1)
    if args.what == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    trained = DDP(model) if args.what in ("never", "damped") else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    torch.manual_seed(10 + rank)
    for step in range(args.steps):
        x = torch.randn(16, 8)
        loss = (trained(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        if args.what == "by-hand":
            average(model)
        optimizer.step()
        if args.what == "damped":
            damp(model)
        print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)
    end(model)


if args.what == "gan":
    train_gan()
else:
    train_without_zeroing()
