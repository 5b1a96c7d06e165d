"""FSDP1 over tensor parallel layers of torch's own styles, on 2 x 2 ranks."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from around_the_loop import finish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--original", action="store_true", help="the optimizer has the original parameters")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 12))
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    how = {"device_id": torch.device("cpu"), "device_mesh": mesh["dp"], "use_orig_params": args.original}
    model = FullyShardedDataParallel(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(10 + mesh["dp"].get_local_rank())
    for step in range(20):
        x = torch.randn(8, 12, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    parts = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    parts = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
    finish(parts, args.out, [part.detach() for part in parts], "parts sha256")


if __name__ == "__main__":
    main()
