"""FullyShardedDataParallel, torch's first: flat or original parameters, in one of its strategies."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from around_the_loop import finish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

STEPS = 24


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--original", action="store_true", help="the optimizer has the original parameters")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    how = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy[args.strategy]}
    how["use_orig_params"] = args.original
    if args.strategy == "HYBRID_SHARD":
        how["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "part"))
    inner = FullyShardedDataParallel(nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.1)), **how)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), inner, nn.Linear(24, 12)), **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(STEPS):
        x = torch.randn(8, 12, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        if step % 3 == 2:  # the whole parameters stand in the place of the parts
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                length = sum(one.norm() for one in model.parameters()).item()
            print(f"step {step} length {length:.9f}", flush=True)
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    parts = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    finish(parts, args.out, model.state_dict(), "parts sha256")


if __name__ == "__main__":
    main()
