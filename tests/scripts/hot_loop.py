"""Thousands of very short steps, to see whether memory or file handles grow. Memory goes to stderr."""

import argparse
import hashlib
import os
import sys

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def report(rank, when):
    process = psutil.Process()
    rss_mib = process.memory_info().rss / 2**20
    print(f"[rank {rank}] {when} rss_mib {rss_mib:.1f} fds {process.num_fds()}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--warmup", type=int, default=200)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    seen = torch.zeros(1)
    for step in range(args.steps):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count = torch.ones(1)
        dist.all_reduce(count)
        seen += count
        if step == args.warmup:
            report(rank, "start")
        if step % 1000 == 999:
            print(f"[rank {rank}] step {step} loss {loss.item()!r} seen {int(seen)}")
    report(rank, "end")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(args.out, "final.pt"))
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"[rank {rank}] sha256 model {hashlib.sha256(weights).hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
