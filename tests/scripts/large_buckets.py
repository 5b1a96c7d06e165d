"""A model whose gradients fill several of DDP's buckets, of a megabyte and more; two micro-steps a step.

--overflows 10,11: in these iterations a gradient is infinite, and a GradScaler leaves the step out.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 520


def main():
    args = arguments(steps=24, overflows="")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, WIDTH), *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
    model = DDP(net, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=bool(args.overflows))
    torch.manual_seed(rank)
    for step in range(args.steps):
        total = 0.0
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                loss = model(torch.randn(8, 32)).square().mean() / 2
                too_much = float("inf") if str(step) in args.overflows.split(",") else 1.0
                scaler.scale(loss * too_much).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"[rank {rank}] step {step} loss {total!r} norm {norm.item()!r}")
    finish(net.parameters(), args.out, net.state_dict())


if __name__ == "__main__":
    main()
