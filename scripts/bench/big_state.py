"""The script that checkpoint.py trains: much state, little work, so that what saving costs can be seen.

    torchrun --nproc-per-node 2 big_state.py --mib 1024 --steps 100 --step-logs logs --report reports --save torch

Parameters and AdamW's state together take `--mib` in each rank, and all ranks hold the same. A step is a small
all-reduce, a gradient of one value, and the optimizer's own pass over the state. It can save itself as people do it, by
torch.save in rank 0 while the others wait, or by torch.distributed.checkpoint.async_save. Begin with main().
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

DEPTH = 8
BYTES_OF_PARAMETER = 12  # its value and two moments, float32
COPIES = 5


class Log:
    """One line per completed step: `step <number> <time> <pid>`, as steplog.py reads it. None: nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.file = open(path, "a", buffering=1) if path is not None else None  # noqa: SIM115

    def write(self, word: str, step: int) -> None:
        if self.file is not None:
            self.file.write(f"{word} {step} {time.time():.6f} {os.getpid()}\n")


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


def sync(path: Path) -> None:
    """Return when the disk has a file."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def evict(path: Path) -> None:
    """Drop a file from the page cache, as if it had been written on another machine or long ago."""
    sync(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


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


def copy_s(size_bytes: int) -> float:
    """Median seconds of a plain copy of so many bytes within memory that is there, while all ranks do the same."""
    source, target = torch.ones(size_bytes // 4), torch.ones(size_bytes // 4)
    took_s = []
    for _ in range(COPIES):
        dist.barrier()
        began_s = time.perf_counter()
        target.copy_(source)
        took_s.append(time.perf_counter() - began_s)
    return median(took_s)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, log: Log, saver: Saver) -> None:
    for step in range(args.steps):
        loss = torch.tensor([1.0 + dist.get_rank() + step % 3])
        dist.all_reduce(loss)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.fill_(loss.item())
        optimizer.step()
        log.write("step", step + 1)
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
        tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v is not None)]
        size_bytes = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        report: dict[str, Any] = {"size_bytes": size_bytes, "blocked_s": saver.blocked_s, "durable_s": saver.durable_s}
        report["copy_s"] = copy_s(size_bytes // dist.get_world_size())
        if args.save == "torch":
            report |= load(args.save_to / "state.pt", model, optimizer)
        (args.report / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
