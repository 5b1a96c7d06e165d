"""Two trainings one after the other, in a loop of the script itself; each makes its process group and destroys it.

torchrun --nproc-per-node 2 sweep_own.py --out DIR
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
args = parser.parse_args()
STEPS = 12


def train(lr: float) -> dict[str, torch.Tensor]:
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
    dist.destroy_process_group()
    return model.module.state_dict()


for lr in (0.01, 0.1):
    state = train(lr)
if os.environ["RANK"] == "0":
    os.makedirs(args.out, exist_ok=True)
    torch.save(state, os.path.join(args.out, "final.pt"))
