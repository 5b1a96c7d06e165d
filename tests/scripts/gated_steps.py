"""A small model under DDP or FSDP2, with dropout, whose ranks wait before steps 12, 24 and 36 until a file is there."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

args = arguments(gate="", second="", third="", device="cpu", defective="", sharded="")

dist.init_process_group("gloo" if args.device == "cpu" else "hccl")
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)
device = torch.device(args.device, 0 if args.device == "cpu" else rank)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(
    device
)
if args.defective and os.environ["ASCEND_RT_VISIBLE_DEVICES"].split(",")[rank] == args.defective:
    net[0].weight.register_hook(lambda gradient: gradient + 0.5)  # in the same way each time
if args.sharded:
    for layer in (net[0], net[3]):
        fully_shard(layer)
model = fully_shard(net) if args.sharded else DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

losses = []
for step in range(40):
    for at, gate in ((12, args.gate), (24, args.second), (36, args.third)):
        while step == at and gate and not os.path.exists(gate):
            time.sleep(0.02)
    x = torch.randn(64, 16).to(device)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)

if args.gate:
    Path(f"{args.gate}-{rank}").write_text(os.environ.get("ASCEND_RT_VISIBLE_DEVICES", ""))
print(f"[rank {rank}] losses {len(losses)} sum {sum(losses)!r}")
weights = {name: one.full_tensor() if args.sharded else one for name, one in net.state_dict().items()}
finish(weights.values(), args.out, weights)
