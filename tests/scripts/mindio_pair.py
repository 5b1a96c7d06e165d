"""Plain data parallelism in a framework's way: a train function of its own, recovered by callbacks of mindio_ttp.

Every rank holds a whole copy of the optimizer's state. Nothing but the rollback is the framework's own here.
"""

import argparse
import hashlib
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mindio_ttp.framework_ttp import (
    tft_end_updating_os,
    tft_exception_handler,
    tft_init_controller,
    tft_init_processor,
    tft_is_reboot_node,
    tft_pause_train,
    tft_register_rollback_handler,
    tft_set_optimizer_replica,
    tft_start_controller,
    tft_start_processor,
    tft_start_updating_os,
)

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def batch_of(iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randn(8, 16, generator=generator)


@tft_exception_handler
def train(args, model, optimizer):
    if args.is_joining:
        args.is_joining = False
        raise RuntimeError("ARF FINISH")
    while args.iteration < options.steps:
        optimizer.zero_grad()
        loss = model(batch_of(args.iteration)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        dist.barrier()
        tft_start_updating_os()
        optimizer.step()
        tft_end_updating_os(args.iteration + 1)
        args.iteration += 1
        tft_pause_train(args.iteration)


def rollback(step, args, ctx):
    args[0].iteration = step


if rank == 0:
    tft_init_controller(rank, world, False, True)
    tft_start_controller("127.0.0.1", 8000, False)
tft_init_processor(rank, world, False, False, "", True, True)
tft_start_processor("127.0.0.1", 8000)
args = SimpleNamespace(iteration=0, is_joining=tft_is_reboot_node())
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
tft_set_optimizer_replica(rank, [{"rank_list": list(range(world)), "replica_cnt": world, "replica_shift": 0}])
tft_register_rollback_handler(rollback)
train(args, model, optimizer)
found = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"rank {rank} sha256 {found}", flush=True)
if rank == 0 and options.out:
    os.makedirs(options.out, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(options.out, "final.pt"))
dist.destroy_process_group()
