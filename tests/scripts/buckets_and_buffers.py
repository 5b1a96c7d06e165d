"""DDP that broadcasts in one line two buckets' sizes once (8 bytes), and a buffer of 8 bytes in each step."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
torch.manual_seed(100 + rank)
for step in range(12):
    loss = wrapped(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item()!r}", flush=True)
if rank == 0:
    print("buckets", wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"])
finish(model.state_dict().values(), arguments().out, model.state_dict())
