"""Trains, and prints at its end with which of torch's variables for devices its process was started.

What is in /proc is what the kernel has given the process, before its Python ran.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=1.0)
for step in range(12):
    weight.grad = torch.full((4,), float(step + rank))
    dist.all_reduce(weight.grad)
    optimizer.step()
with open("/proc/self/environ") as file:
    given = [line for line in file.read().split("\0") if line.startswith(("TORCH_NCCL_", "TORCH_HCCL_"))]
print(f"[rank {rank}] started with {' '.join(sorted(given))}", flush=True)
dist.destroy_process_group()
