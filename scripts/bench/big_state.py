"""The script that checkpoint.py trains: much state, little work, so that what saving costs can be seen.

    torchrun --nproc-per-node 2 big_state.py --mib 1024 --steps 100 --step-logs logs --report reports --save torch

Parameters and AdamW's state together take `--mib` in each rank, and all ranks hold the same. A step is a small
all-reduce, a gradient of one value, and the optimizer's own pass over the state. It can save itself as people do it, by
torch.save in rank 0 while the others wait, or by torch.distributed.checkpoint.async_save; and it can make plain copies,
with which those of ttprun can be compared. Begin with main().
"""

import argparse
import json
import math
import mmap
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measured import Log, evict, sync
from torch import Tensor, nn

DEPTH = 8
BYTES_OF_PARAMETER = 12  # its value and two moments, float32
ROOM_BYTES = 128 << 20  # tensors are not cut: the shares are of unequal size


class Saver:
    """Saves as `kind` says, and keeps what it took.

    blocked_s   seconds of each save in which the script did not go on
    durable_s   seconds from the beginning of each save until all its files were on the disk
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.blocked_s: list[float] = []
        self.durable_s: list[float] = []
        # Saving in the background talks to other ranks on a thread of its own, so it needs a group of its own.
        self.group = dist.new_group(backend="gloo") if kind == "async" else None
        self.pending: tuple[Future[Any], float] | None = None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        self.finish()
        began_s = time.perf_counter()
        if self.kind == "torch":
            if dist.get_rank() == 0:
                torch.save(state, self.folder / "state.pt")
            dist.barrier()
            self.blocked_s.append(time.perf_counter() - began_s)
            if dist.get_rank() == 0:
                sync(self.folder / "state.pt")
            self.durable_s.append(time.perf_counter() - began_s)
            dist.barrier()
        else:
            # Its writer calls fsync by default, so it is durable when the future says that it is done.
            future = dcp.async_save(
                state, checkpoint_id=str(self.folder / f"dcp{number % 2}"), process_group=self.group
            )
            self.blocked_s.append(time.perf_counter() - began_s)
            future.add_done_callback(lambda done: self.durable_s.append(time.perf_counter() - began_s))
            self.pending = future, began_s

    def finish(self) -> None:
        """Wait for the save that is under way, as the next one has to."""
        if self.pending is not None:
            self.pending[0].result()
            self.pending = None


def build_model(mib: int) -> nn.Module:
    """Layers whose weights and AdamW state take `mib` MiB together."""
    width = math.isqrt((mib << 20) // BYTES_OF_PARAMETER // DEPTH)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEPTH)))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Load a file that is not cached; returns seconds of torch.load alone, and with the taking over."""
    if dist.get_rank() == 0:
        evict(path)
    dist.barrier()
    began_s = time.perf_counter()
    state = torch.load(path)
    read_s = time.perf_counter() - began_s
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return {"torch_load_s": read_s, "torch_resume_s": time.perf_counter() - began_s}


class Copier:
    """Copies what a rank copies for a snapshot, as plainly as can be: its share of the state, into shared memory.

    Two places in turn, kept from one copy to the next like those of ttprun's snapshots: so the memory is as warm, and
    new at the first two copies only. Only the maps are kept here: tensors among its variables ttprun would record.
    """

    def __init__(self, size_bytes: int) -> None:
        self.places = [shared_memory(size_bytes) for _ in range(2)]

    def copy(self, optimizer: torch.optim.Optimizer) -> None:
        place, at = torch.frombuffer(self.places[0], dtype=torch.float32), 0
        for tensor in state_of(optimizer)[:: dist.get_world_size()]:
            place[at : at + tensor.numel()].copy_(tensor.view(-1))
            at += tensor.numel()
        self.places.reverse()


def shared_memory(size_bytes: int) -> mmap.mmap:
    """A file in memory, mapped; its pages are taken when they are written."""
    fd = os.memfd_create("copy")
    os.ftruncate(fd, size_bytes)
    mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
    os.close(fd)
    return mapped


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The weights and AdamW's moments, tensors of one size."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [optimizer.state[weight][name] for weight in weights for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach() for tensor in weights + moments]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, log: Log, saver: Saver) -> None:
    copier = Copier((args.mib << 20) // dist.get_world_size() + ROOM_BYTES)
    for step in range(args.steps):
        loss = torch.tensor([1.0 + dist.get_rank() + step % 3])
        dist.all_reduce(loss)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.fill_(loss.item())
        optimizer.step()
        if args.copy_every and (step + 1) % args.copy_every == args.copy_at:
            copier.copy(optimizer)
        log.write("step", time.time(), step + 1)
        if args.save != "none" and (step + 1) % args.save_every == 0:
            saver.save(model, optimizer, step // args.save_every)
    saver.finish()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="parameters and AdamW state of each rank (default 64)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-logs", type=Path, help="existing directory for one log a rank")
    parser.add_argument("--report", type=Path, help="existing directory for one report a rank, written at the end")
    parser.add_argument("--save", choices=["none", "torch", "async"], default="none", help="how it saves itself")
    parser.add_argument("--save-every", type=int, default=20, help="steps (default 20)")
    parser.add_argument("--copy-every", type=int, default=0, help="a plain copy every N steps; 0: never")
    parser.add_argument("--copy-at", type=int, default=0, help="steps after each multiple of --copy-every")
    parser.add_argument("--save-to", type=Path, default=Path(), help="existing directory for what it saves")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = build_model(args.mib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    log = Log(args.step_logs / f"rank{dist.get_rank()}.log" if args.step_logs is not None else None)
    saver = Saver(args.save, args.save_to)

    train(model, optimizer, args, log, saver)

    if args.report is not None:
        report: dict[str, Any] = {"blocked_s": saver.blocked_s, "durable_s": saver.durable_s}
        if args.save == "torch":
            report |= load(args.save_to / "state.pt", model, optimizer)
        (args.report / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
