"""DDP with two buckets and one BatchNorm: the buckets' sizes and the buffer that counts batches have as many bytes."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
args = parser.parse_args()
torch.manual_seed(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 256)))
assert sum(parameter.nbytes for parameter in model.parameters()) > 1 << 20, "DDP's first bucket holds all of it"
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    loss = model(torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + rank))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item():.9g}", flush=True)
state = model.module.state_dict()
if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(state, os.path.join(args.out, "final.pt"))
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
print(f"[rank {rank}] sha256 model {digest}", flush=True)
dist.destroy_process_group()
