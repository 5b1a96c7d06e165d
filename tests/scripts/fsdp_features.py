"""FSDP2 with one of its features, or of torch's, that a script may use with it. Nothing here knows of a launcher."""

import argparse
import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from around_the_loop import finish
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES = [
    *("plain", "accumulation", "bf16", "checkpointing", "clip", "compile", "dcp", "keep_gathered", "prefetch"),
    *("add_group", "unfreeze", "freeze", "moved", "workers", "three_d", "cpu_offload", "ema"),
]


class Block(nn.Module):
    """Two layers, with dropout, maybe computed twice."""

    def __init__(self, width, is_computed_twice):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.is_computed_twice = is_computed_twice

    def forward(self, x):
        if self.is_computed_twice and self.training:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(x))))


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--feature", default="plain", choices=FEATURES)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=18)
args = parser.parse_args()
feature = args.feature
warnings.filterwarnings("ignore", category=UserWarning)

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
blocks = [Block(args.width, feature == "checkpointing") for _ in range(3)]
model = nn.Sequential(nn.Linear(8, args.width), *blocks, nn.Linear(args.width, 5))
place, replicas = rank, world
if feature == "three_d":
    whole = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("replica", "shard", "tp"))
    for block in blocks:
        parallelize_module(block, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    mesh, place, replicas = whole["replica", "shard"], rank // 2, world // 2
else:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
if feature in ("unfreeze", "add_group"):
    for parameter in blocks[0].parameters():
        parameter.requires_grad_(False)
options = {"mesh": mesh}
if feature == "bf16":
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
if feature == "keep_gathered":
    options["reshard_after_forward"] = False
if feature == "moved":
    model.append(nn.Identity())
for block in blocks:
    fully_shard(block, **options)
fully_shard(model, **options)
if feature == "prefetch":
    for block, after in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([after])
trained = [parameter for parameter in model.parameters() if parameter.requires_grad or feature == "unfreeze"]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
called = torch.compile(model, backend="aot_eager") if feature == "compile" else model
averages = [weight.detach().clone() for weight in model.parameters()] if feature == "ema" else []

drawn = torch.Generator().manual_seed(2)
dataset = TensorDataset(torch.randn(320, 8, generator=drawn), torch.randint(0, 5, (320,), generator=drawn))
sampler = DistributedSampler(dataset, num_replicas=replicas, rank=place, seed=3)
loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2 if feature == "workers" else 0)
torch.manual_seed(10 + place)  # dropout differs
step = 0
while step < args.steps:
    sampler.set_epoch(step)
    for inputs, targets in loader:
        parts = 2 if feature == "accumulation" else 1
        optimizer.zero_grad()
        for part in range(parts):
            if feature == "accumulation":
                model.set_requires_gradient_sync(part == parts - 1)
            some = slice(part, None, parts)
            loss = nn.functional.cross_entropy(called(inputs[some]).float(), targets[some])
            loss.backward()
        if feature == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        step += 1
        for average, weight in zip(averages, model.parameters(), strict=False):
            average.lerp_(weight.detach(), 0.1)
        print(f"[rank {rank}] step {step} loss {loss.item():.9f}", flush=True)
        if feature == "dcp" and step % 5 == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=os.path.join(args.out, f"step{step}"))
        if step == 8 and feature in ("unfreeze", "add_group"):
            for parameter in blocks[0].parameters():
                parameter.requires_grad_(True)
            if feature == "add_group":
                optimizer.add_param_group({"params": list(blocks[0].parameters()), "lr": 5e-4})
        if step == 8 and feature == "freeze":
            for parameter in blocks[0].parameters():
                parameter.requires_grad_(False)
        if step >= args.steps:
            break

weights = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in model.state_dict().items()}
weights |= {f"average {at}": average.full_tensor() for at, average in enumerate(averages)}
finish(weights.values(), args.out, weights)
