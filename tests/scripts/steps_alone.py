"""The ranks do not step together: rank 0 alone steps the optimizer and hands the weights out, or all step, but a
collective that rank 0 has issued before its step, the others issue after theirs (--kind straddle).

torchrun --nproc-per-node 2 steps_alone.py --out DIR
"""

import hashlib

import torch
import torch.distributed as dist
from around_the_loop import arguments

args = arguments(kind=["alone", "straddle"])

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
weight = torch.ones(8, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(10):
    optimizer.zero_grad()
    (weight * torch.randn(8)).sum().square().backward()
    if args.kind == "straddle":
        dist.all_reduce(weight.grad)
        early = dist.broadcast(news := torch.full((2,), float(rank)), src=1, async_op=True) if rank == 0 else None
        optimizer.step()
        if early is None:
            dist.broadcast(news := torch.full((2,), float(rank)), src=1)
        else:
            early.wait()
        assert news.tolist() == [1.0, 1.0]
    else:
        dist.reduce(weight.grad, dst=0)
        if rank == 0:
            optimizer.step()
        dist.broadcast(weight.detach(), src=0)
    print(f"[rank {rank}] step {step}")
print(f"[rank {rank}] sha256 {hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()}")
dist.destroy_process_group()
