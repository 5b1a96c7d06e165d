"""The ranks do not step together: rank 0 alone steps the optimizer and hands the weights out."""

import hashlib

import torch
import torch.distributed as dist
from around_the_loop import arguments

arguments()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
weight = torch.ones(8, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(10):
    optimizer.zero_grad()
    (weight * torch.randn(8)).sum().square().backward()
    dist.reduce(weight.grad, dst=0)
    if rank == 0:
        optimizer.step()
    dist.broadcast(weight.detach(), src=0)
    print(f"[rank {rank}] step {step}")
print(f"[rank {rank}] sha256 {hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()}")
dist.destroy_process_group()
