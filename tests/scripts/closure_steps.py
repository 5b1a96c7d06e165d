"""LBFGS, which calls its closure several times in a step."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

args = arguments()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
# No tolerance: each rank looks at its own loss, and all must call the closure as often.
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2, tolerance_grad=0, tolerance_change=0)
torch.manual_seed(100 + rank)
for step in range(18):
    inputs = torch.randn(8, 16)

    def closure(inputs=inputs):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
        loss.backward()
        return loss

    print(f"[rank {rank}] step {step} loss {optimizer.step(closure).item()!r}", flush=True)
finish(model.module.state_dict().values(), args.out, model.module.state_dict())
