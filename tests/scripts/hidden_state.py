"""Steps that depend on state which no record holds and no replay sets up again.

torchrun --nproc-per-node 2 hidden_state.py --out DIR --kind KIND

augmentation  a counter outside of the script's own modules scales what each rank trains on
draws         the same counter says how many random numbers a step draws
measured      each step's time is reduced over the ranks, as for a log
"""

import random
import string  # any module that is not the script's
import time

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    args = arguments(steps=20, kind="")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    random.seed(rank)
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
    model = DDP(net, bucket_cap_mb=0.001)
    torch.manual_seed(1 + rank)
    rows = torch.randn(10 * args.steps, 8)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=10, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    string.ttprun_test_counter = 0
    took_s = torch.zeros(1)
    for step, (x, y) in enumerate(loader):
        began_s = time.perf_counter()
        string.ttprun_test_counter += 1
        if args.kind == "augmentation":
            x = x * (1 + 0.1 * (string.ttprun_test_counter % 7))
        if args.kind == "draws":
            for _ in range(string.ttprun_test_counter % 7):
                random.random()
        loss = (model(x) - y).square().mean() * (1 + 0.01 * random.random())
        if args.kind == "measured":
            dist.all_reduce(took_s)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took_s.fill_(time.perf_counter() - began_s)
        print(f"[rank {rank}] step {step} loss {loss.item()!r}")
    finish(net.parameters(), args.out, net.state_dict())


if __name__ == "__main__":
    main()
