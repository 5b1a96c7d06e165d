"""Each step's loss is scaled by what a generator expression says, whose place no record holds."""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 16


def main():
    args = arguments()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    scales = (1 + 0.1 * (n % 7) for n in range(10**6) for _ in range(1))
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * next(scales)
        loss.backward()
        optimizer.step()
        print(f"[rank {rank}] step {step} loss {loss.item()!r}")
    finish(net.parameters(), args.out, net.state_dict())


if __name__ == "__main__":
    main()
