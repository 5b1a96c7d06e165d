"""A small model under DDP with dropout, whose ranks wait before step 12 until a file is there."""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--gate", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

losses = []
for step in range(40):
    while step == 12 and args.gate and not os.path.exists(args.gate):
        time.sleep(0.02)
    x = torch.randn(64, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)

if rank == 0:
    os.makedirs(args.out, exist_ok=True)
    torch.save(net.state_dict(), os.path.join(args.out, "final.pt"))
values = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
print(f"[rank {rank}] losses {len(losses)} sum {sum(losses)!r}")
print(f"[rank {rank}] sha256 model {hashlib.sha256(values).hexdigest()}")
dist.destroy_process_group()
