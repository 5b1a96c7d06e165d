"""What the scripts that the benchmarks run report: logs of steps, reports, hashes; and files on the disk.

Their ranks import this, so it costs no time that torch does not cost. `steplog.py` reads the logs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class Log:
    """One line per completed step: `step <number> <time> <pid>`; and how far the process is: `<word> - <time> <pid>`.

    path   appended to, so that a restarted run goes on in it; None: nothing is written
    """

    def __init__(self, path: Path | None) -> None:
        self.file = open(path, "a", buffering=1) if path is not None else None  # noqa: SIM115

    def write(self, word: str, at_s: float, step: int | None = None) -> None:
        if self.file is not None:
            self.file.write(f"{word} {'-' if step is None else step} {at_s:.6f} {os.getpid()}\n")


LOOK_AGAIN_S = 0.002


class Steps:
    """The steps of a framework's loop, which calls done() at the end of each one: a log, and blocks of steps in turns.

    With --turns FOLDER, block n of --block steps begins when FOLDER/n exists, and a line on each block goes into
    FOLDER/rank<rank>.jsonl, of which turns.py reads the figures.
    """

    def __init__(self, args: argparse.Namespace, started_at_s: float, imported_at_s: float) -> None:
        self.rank = os.environ["RANK"]
        self.log = Log(args.step_logs / f"rank{self.rank}.log" if args.step_logs is not None else None)
        self.log.write("start", started_at_s)
        self.log.write("imported", imported_at_s)
        self.turns, self.block = args.turns, args.block
        self.begin_block()

    def begin_block(self) -> None:
        self.step_s: list[float] = []
        self.main_s: list[float] = []
        self.cpu_before_s = time.process_time()
        self.began_s, self.main_began_s = time.perf_counter(), time.thread_time()

    def done(self, step: int) -> None:
        """A step has been completed; steps are counted from 0."""
        self.log.write("step", time.time(), step)
        if self.turns is None:
            return
        self.step_s.append(time.perf_counter() - self.began_s)
        self.main_s.append(time.thread_time() - self.main_began_s)
        if len(self.step_s) < self.block:
            self.began_s, self.main_began_s = time.perf_counter(), time.thread_time()
            return
        cpu_s = time.process_time() - self.cpu_before_s
        figures = {
            "pid": os.getpid(),
            "step_s": statistics.median(self.step_s),
            "mean_step_s": statistics.mean(self.step_s),
            "main_step_s": statistics.mean(self.main_s),
            "median_main_step_s": statistics.median(self.main_s),
            "cpu_step_s": cpu_s / self.block,
            **memory_bytes(),
        }
        with open(self.turns / f"rank{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(figures) + "\n")
        turn = self.turns / str((step + 1) // self.block)
        while not turn.exists():
            time.sleep(LOOK_AGAIN_S)
        self.begin_block()


def framework_arguments(description: str) -> argparse.ArgumentParser:
    """The arguments of a script with a framework's loop."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--checkpoint", type=Path, help="directory to save to and to resume from")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--step-logs", type=Path, help="existing directory for one log a rank")
    add_turns(parser)
    return parser


def add_turns(parser: argparse.ArgumentParser) -> None:
    """The arguments of a script whose steps are measured in turns."""
    parser.add_argument("--turns", type=Path, help="existing directory in which somebody says which block may begin")
    parser.add_argument("--block", type=int, default=20, help="steps of a block (default 20)")


def sha256_of(model: nn.Module) -> str:
    """SHA-256 over the bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def memory_bytes() -> dict[str, int]:
    """This process' peak memory, and what is resident of memory files that it shares with other processes (Linux)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    shared, is_memory_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split(None, 1)[0]
        if not word.endswith(":"):
            is_memory_file = "/memfd:" in line
        elif word == "Rss:" and is_memory_file:
            shared += int(line.split()[1]) << 10
    return {"peak_bytes": int(status["VmHWM"].split()[0]) << 10, "memory_file_bytes": shared}


def write_report(folder: Path, model: nn.Module, step_s: list[float], cpu_s: float) -> None:
    """What this rank has measured, as JSON in `folder`.

    step_s   seconds of each step after the warm-up
    cpu_s    processor time that these steps took together, in all threads
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    quantiles = statistics.quantiles(step_s, n=10)
    report = {
        "pid": os.getpid(),
        "steps": len(step_s),
        "median_step_s": statistics.median(step_s),
        "p10_step_s": quantiles[0],
        "p90_step_s": quantiles[-1],
        "cpu_step_s": cpu_s / len(step_s),
        "parameters": sum(parameter.numel() for parameter in trained),
        "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trained),
        **memory_bytes(),
    }
    from torch import distributed as dist

    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))


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
