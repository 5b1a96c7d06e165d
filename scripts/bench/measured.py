"""What the scripts that the benchmarks run report: logs of steps, reports, hashes; and files on the disk.

Their ranks import this, so it costs no time that torch does not cost. `steplog.py` reads the logs.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
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
