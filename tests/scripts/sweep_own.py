"""Two trainings one after the other, in a loop of the script itself; each makes its process group and destroys it.

torchrun --nproc-per-node 2 sweep_own.py --out DIR
"""

import torch
import torch.distributed as dist
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel

args = arguments()
STEPS = 12


def train(lr: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=pair)
        print(f"[rank {rank}] lr {lr} step {step} loss {total.item():.9g}", flush=True)
    finish(model.parameters(), args.out, model.module.state_dict())


for lr in (0.01, 0.1):
    train(lr)
