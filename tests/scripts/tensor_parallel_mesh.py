"""Tensor parallel layers by torch's own styles, and data parallelism by hand. Nothing here knows of a launcher."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from around_the_loop import arguments, finish
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Model(nn.Module):
    """An embedding that all ranks hold, and a network of which each holds a part."""

    def __init__(self, words, width):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


# gates: steps after which all wait until the file GATE<step> is there; reseed: each step has a seed of its own
args = arguments(steps=20, tp=2, fsdp=False, reseed=False, gate="", gates="")

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
torch.manual_seed(1)
model = Model(words=50, width=16)
model = parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
if args.fsdp:
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
replicas = mesh["dp"].get_group()
place = mesh["dp"].get_local_rank()
batches = torch.Generator().manual_seed(10 + place)

for step in range(args.steps):
    while str(step) in args.gates.split(",") and not os.path.exists(f"{args.gate}{step}"):
        time.sleep(0.02)
    if args.reseed:
        batches.manual_seed(100 * step + place)
    tokens = torch.randint(0, 50, (4, 9), generator=batches)
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    for parameter in () if args.fsdp else model.parameters():
        gradient = parameter.grad
        gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(gradient, group=replicas)
        gradient /= replicas.size()
    optimizer.step()
    print(f"[rank {rank}] step {step + 1} loss {loss.item():.9f}", flush=True)

weights = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in model.state_dict().items()}
finish(weights.values(), args.out, weights)
