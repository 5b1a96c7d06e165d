"""Each rank trains a model of its own, without a process group, and some have more steps than others.

torchrun --nproc-per-node 2 each_for_itself.py --out DIR

--group before: a group is made and destroyed before the first step; late: after half of the steps all train one model
in a group; ends: one is made after the last step, to gather what came of it.
"""

import gc
import hashlib
import os
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments
from torch import nn

args = arguments(
    steps=40,
    more=0,  # further steps of each rank than of the one before
    seconds=0.01,  # of a step, at least
    rate=float(os.environ.get("RATE", "1e-2")),  # of rank 0, at first
    hidden=16,
    group=["no", "before", "late", "ends"],
    unseeded=False,  # the steps draw from the system
    gate="",  # from step 10 on, the last rank waits after each for GATE<step>
)

rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
torch.manual_seed(rank)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, args.hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(args.hidden, 2))
if args.group == "before":
    dist.init_process_group("gloo")
    seeds = torch.tensor([float(rank)])
    dist.all_reduce(seeds)
    dist.destroy_process_group()
    torch.manual_seed(int(seeds) * 100 + rank)
optimizer = torch.optim.Adam(model.parameters(), lr=args.rate * (rank + 1))
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)

steps = args.steps + rank * args.more
half = steps // 2 if args.group == "late" else steps
step = 0
for _ in range(steps):
    for features, labels in loader:
        if step == half:
            break
        if step == 19 and "FAILS" in os.environ:
            raise ValueError("it fails")
        optimizer.zero_grad()
        if args.unseeded:
            features = features + int.from_bytes(os.urandom(1), "little") * 0.0
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
        print(f"[rank {rank}] step {step} loss {loss.item():.6f}", flush=True)
        time.sleep(args.seconds)
        while args.gate and rank == last and step >= 10 and not os.path.exists(f"{args.gate}{step}"):
            time.sleep(0.02)

if args.group in ("late", "ends"):
    dist.init_process_group("gloo")
    torch.manual_seed(100)
    model = nn.Linear(8, 2)
    together, schedule = nn.parallel.DistributedDataParallel(model), None
    optimizer = torch.optim.Adam(model.parameters())
    gc.collect()  # the first optimizer, which its schedule keeps in a cycle: no other rank holds what it holds
    torch.manual_seed(100 + rank)
    for features, labels in [*loader, *loader, *loader]:
        if step == steps:
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(together(features), labels)
        loss.backward()
        optimizer.step()
        step += 1
        print(f"[rank {rank}] step {step} loss {loss.item():.6f}", flush=True)
        time.sleep(args.seconds)
    dist.destroy_process_group()

sha = hashlib.sha256()
for value in model.state_dict().values():
    sha.update(value.numpy().tobytes())
print(f"[rank {rank}] sha256 {sha.hexdigest()}", flush=True)
