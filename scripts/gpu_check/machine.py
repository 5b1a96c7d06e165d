"""Part A: the machine and what is installed, in the words of its own programs. Begin with `look`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import psutil
from parts import Place, Row, Task

PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "msgspec",
    "msgpack",
    "xxhash",
    "typer",
    "rich",
    "psutil",
    "pyyaml",
    "safetensors",
)
COMMANDS = {
    "GPU": (
        "nvidia-smi",
        "--query-gpu=name,driver_version,compute_mode,mig.mode.current,memory.total,memory.free,ecc.mode.current",
        "--format=csv,noheader",
    ),
    "links": ("nvidia-smi", "topo", "-m"),
    "kernel": ("uname", "-sr"),
    "shared memory": ("df", "-h", "/dev/shm"),
}


def look(place: Place) -> list[Task]:
    """Part A."""
    tasks = [Task("packages", 10, _packages), Task("cores", 10, _cores), Task("network", 10, _network)]
    for what, command in COMMANDS.items():
        if place.kind == "cuda" or command[0] != "nvidia-smi":
            tasks.append(Task(what, 15, lambda limit_s, what=what, command=command: _say(what, command, limit_s)))
    if place.kind == "cuda":
        tasks.append(Task("a context", 60, _context))
    return tasks


def _packages(_: float) -> Iterator[Row]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "?"
    yield Row("packages", "seen", ", ".join(f"{name} {number}" for name, number in versions.items()), values=versions)


def _cores(_: float) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0))
    yield Row("cores", "seen", f"{cores}, load {os.getloadavg()[0]:.1f}", values={"cores": cores})


def _network(_: float) -> Iterator[Row]:
    by_name = {name: [address.address for address in every] for name, every in psutil.net_if_addrs().items()}
    yield Row(
        "network", "seen", "; ".join(f"{name} {addresses[0]}" for name, addresses in by_name.items()), values=by_name
    )


def _say(what: str, command: tuple[str, ...], limit_s: float) -> Iterator[Row]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except FileNotFoundError:
        yield Row(what, "left out", f"there is no {command[0]}")
        return
    lines = (done.stdout or done.stderr).strip().splitlines()
    yield Row(
        what, "seen", lines[0] if len(lines) == 1 else f"{len(lines)} lines", tuple(lines if len(lines) > 1 else ())
    )


_CONTEXT = """
import time, torch
began = time.monotonic(); free, total = torch.cuda.mem_get_info(0)
torch.ones(1, device="cuda"); torch.cuda.synchronize(); took = time.monotonic() - began
left = torch.cuda.mem_get_info(0)[0]
print(f"{took:.2f} s for a context; {free >> 20} MiB of {total >> 20} were free, {left >> 20} behind a kernel")
"""


def _context(limit_s: float) -> Iterator[Row]:
    command = [sys.executable, "-c", _CONTEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no output"]
    yield Row("a context", "ok" if done.returncode == 0 else "FAILED", lines[-1])
