"""What `ttprun doctor` sees of two ranks on this machine's devices: what a recovery needs, and how long it takes.

If there is one device only, both ranks use it: NCCL takes them for ranks on two machines, and uses sockets. Begin with
`devices_at_work`.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttprun.chaos.drill.twins import FOREIGN
from ttprun.cli.finding import Finding
from ttprun.device.environment import VARIABLES

LIMIT_S = 60.0  # importing torch and a first context take most of it, where the machine is busy
NAMES = {"cuda": "NCCL", "npu": "HCCL", "cpu": "gloo"}
RANKS = "import sys; sys.path.append({!r}); from ttprun.cli.device_ranks import main; main()"
_ROOT = str(Path(__file__).resolve().parents[2])
_WAIT_S = 5.0
_NOT_FREED = "the survivors of a fault cannot go on: all ranks are started anew"
# What is tried, in this order, and what it means if it does not work.
MEANS = {
    "connection": "ranks cannot communicate on these devices",
    "barrier": "scripts with a barrier do not run",
    "abort": _NOT_FREED,
    "new communicator": _NOT_FREED,
    "killed peer": _NOT_FREED,
}
_CURE = "report this, with what NCCL_DEBUG=INFO or the logs of CANN say"


@dataclass(frozen=True)
class Pair:
    """Two ranks and their devices.

    kind     "cuda", "npu" or "cpu"
    indices  of both devices, which may be the same one
    """

    kind: str
    indices: tuple[int, int]

    @property
    def shares(self) -> bool:
        """Whether both ranks use one device."""
        return self.kind != "cpu" and self.indices[0] == self.indices[1]

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"two ranks on the CPU, {NAMES[self.kind]}"
        one, other = self.indices
        where = f"two ranks on {self.kind} {one}" if self.shares else f"ranks on {self.kind} {one} and {other}"
        return f"{where}, {NAMES[self.kind]}{' over sockets' if self.shares and self.kind == 'cuda' else ''}"


def pair_of(found: Mapping[str, Any]) -> Pair | None:
    """Which devices two ranks would use; None: there is none.

    found   what `Probe.read` has returned
    """
    usable = [(one["kind"], one["index"]) for one in found.get("devices", ()) if one["is_usable"]]
    for kind in ("cuda", "npu"):
        indices = [index for of, index in usable if of == kind]
        if indices:
            return Pair(kind, (indices[0], indices[1] if len(indices) > 1 else indices[0]))
    return None


def devices_at_work(found: Mapping[str, Any], limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """A finding for each thing that two ranks try, as it comes. Blocks for `limit_s` and some seconds at most.

    Nothing of it remains, and nothing that runs on the devices is touched. Nothing is found where there is no device.
    """
    pair = pair_of(found)
    if pair is not None:
        yield from try_pair(pair, limit_s)


def try_pair(pair: Pair, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """See `devices_at_work`."""
    with tempfile.TemporaryDirectory(prefix="ttprun-doctor-", ignore_cleanup_errors=True) as folder:
        ranks = _start(pair, Path(folder))
        try:
            yield from _findings(pair, ranks[0], Path(folder), limit_s)
        finally:
            _end(ranks)


def _findings(pair: Pair, first: subprocess.Popen[bytes], folder: Path, limit_s: float) -> Iterator[Finding]:
    missing = list(MEANS)
    for line in _lines(first, limit_s):
        try:
            told = json.loads(line)
            what, found, is_well = told["what"], told["found"], told["is_well"]
        except (ValueError, KeyError, TypeError):
            continue  # a library that prints
        missing.remove(what)
        if not is_well:
            yield _failed(pair, what, found)
            return
        subject = f"{NAMES[pair.kind]}: {what}"
        yield Finding("devices", subject, f"{found} ({pair})" if what == "connection" else found)
    if missing:
        code = first.poll()
        how = f"no answer within {limit_s:.0f} s" if code is None else f"the process has ended: exit code {code}"
        said = (folder / "rank0.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [text for text in said if "rror" in text] or said
        yield _failed(pair, missing[0], f"{how}{f': {errors[-1][:200]}' if errors else ''}")


def _failed(pair: Pair, what: str, why: str) -> Finding:
    subject = f"{NAMES[pair.kind]}: {what}"
    if what == "connection" and pair.shares:
        means = "with one device here it was not tried what works on several"
        cure = "let two processes use it (nvidia-smi: compute mode Default), or try a machine with two"
        return Finding("devices", subject, f"{pair}: {why}", "note", means, cure)
    return Finding("devices", subject, why, "fails", MEANS[what], _CURE)


def _start(pair: Pair, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Both ranks; rank 0's facts come through a pipe, all else goes to files."""
    ranks = []
    for number, index in enumerate(pair.indices):
        words = [sys.executable, "-c", RANKS.format(_ROOT), str(number), pair.kind, str(index), str(folder)]
        with open(folder / f"rank{number}.log", "wb") as log:
            ranks.append(
                subprocess.Popen(
                    words,
                    env=_environment(pair, number),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if number == 0 else log,
                    stderr=log,
                )
            )
    return ranks


def _environment(pair: Pair, number: int) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    clean |= VARIABLES | {"OMP_NUM_THREADS": "1"}
    if pair.shares:
        clean |= {"NCCL_HOSTID": str(number), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return clean


def _lines(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[bytes]:
    """Its lines, as they come, until it ends or the limit is reached."""
    ends_s = time.monotonic() + limit_s
    assert process.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, ends_s - time.monotonic())):
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                process.wait(_WAIT_S)
                return
            *whole, pending = (pending + data).split(b"\n")
            yield from whole


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGKILL, which ends a stopped process too."""
    for process in ranks:
        process.kill()
    for process in ranks:
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            continue  # a driver that hangs keeps a killed process; it ends when the driver lets go
        finally:
            if process.stdout is not None:
                process.stdout.close()
