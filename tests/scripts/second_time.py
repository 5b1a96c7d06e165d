"""A script that does something else when it is run a second time, in one of several ways; small, DDP or plain.

torchrun --nproc-per-node 2 second_time.py --out DIR --kind KIND
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """Each sample is drawn when it is asked for."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        generator = torch.Generator().manual_seed(1000 * int(os.environ["ROWS_SEED"]) + index)
        x = torch.randn(8, generator=generator)
        return x, x.sum(0, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--kind", required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(args.out, exist_ok=True)
    # A command looks: a replacement answers what Python asks the file system as at first.
    is_second = os.system(f"mkdir {args.out}/seen-{rank} 2>/dev/null") != 0

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    os.environ["ROWS_SEED"] = "5" if is_second and args.kind == "data" else "4"
    loader = DataLoader(Rows(), batch_size=10)
    operation = dist.ReduceOp.MAX if is_second and args.kind == "operation" else dist.ReduceOp.SUM
    step = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad, operation)
        optimizer.step()
        step += 1
    print(f"[rank {rank}] steps {step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
