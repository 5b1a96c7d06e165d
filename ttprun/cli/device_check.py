"""What `ttprun doctor` sees of two ranks on this machine's devices: what a recovery needs, and how long it takes.

If there is one device only, both ranks use it: NCCL takes them for ranks on two machines, and uses sockets. Begin with
`devices_at_work`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ttprun.chaos.trial.twins import clean_environment
from ttprun.cli.machine_checks import Finding
from ttprun.device.device_errors import VARIABLES, in_one_line
from ttprun.rank.bootstrap.install import PR_SET_PDEATHSIG

# One of two ranks that try on this machine's devices what a recovery needs there: run by `ttprun doctor`.
#
# Rank 0 prints a line of JSON for each thing, when it is known: {"what", "found", "is_well"}. Rank 1 stops itself, goes
# on, and in the end kills itself. torch may hang in C++ anywhere here; whoever has started us has a limit, and ends us.


BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
ELEMENTS = 1 << 18
NOTICED_S = 3.0  # for so long a dead peer's error is waited for
MEET_S = timedelta(seconds=60)


def main() -> None:
    """Be rank `argv[1]` on device `argv[3]` of kind `argv[2]`; both meet in the directory `argv[4]`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    number, kind, index, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    what = "connection"
    try:
        rank = Rank(number, kind, index, folder)
        for name, act in STEPS.items():
            what = name
            act(rank)
    except Exception as error:
        say(what, in_one_line(error), is_well=False)
    sys.stdout.flush()
    os._exit(0)  # an operation that is stuck is not waited for


def say(what: str, result: str, is_well: bool = True) -> None:
    """Print what is known; rank 1's goes where nobody reads it."""
    print(json.dumps({"what": what, "found": result, "is_well": is_well}), flush=True)


class Rank:
    """A rank that is connected with the other one.

    group    None: torch's default group
    """

    def __init__(self, number: int, kind: str, index: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.number, self.kind, self.index = torch, dist, number, kind, index
        self.module: Any = None if kind == "cpu" else torch.get_device_module(kind)
        if self.module is not None:
            self.module.set_device(index)
        self.store = torch._C._distributed_c10d.FileStore(str(folder / "store"), 2)
        dist.init_process_group(BACKENDS[kind], store=self.store, rank=number, world_size=2)
        self.group: Any = None
        self.tensor = torch.ones(ELEMENTS, device=kind)
        self.synchronize()
        self.meet("ready")  # so that importing torch is not counted as connecting
        self.peer = int(self.store.get(f"ready {1 - number}"))

    def meet(self, where: str) -> None:
        """Wait for the other one without a collective. RuntimeError after MEET_S."""
        self.store.set(f"{where} {self.number}", str(os.getpid()))
        self.store.wait([f"{where} {1 - self.number}"], MEET_S)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.module is not None:
            self.module.synchronize()

    def reduce(self) -> None:
        """An all-reduce of ones, to its end. RuntimeError if the sum is wrong."""
        self.tensor.fill_(1.0)
        self.dist.all_reduce(self.tensor, group=self.group)
        self.synchronize()
        total = self.tensor[-1].item()
        if total != 2.0:
            raise RuntimeError(f"an all-reduce of two ones gives {total}")

    def begin_reduce(self) -> Any:
        """An all-reduce, not waited for."""
        return self.dist.all_reduce(self.tensor, group=self.group, async_op=True)

    def abort(self) -> None:
        """End the communicator, and with it what is stuck in it."""
        group: Any = self.group or self.dist.group.WORLD
        backend = group._get_backend(self.torch.device(self.kind))
        comm_abort = getattr(backend, "abort_hccl_comm", None)
        if comm_abort is not None:  # HCCL ends no task that runs: the device is stopped first
            self.module.stop_device(self.index)
            self.module.restart_device(self.index)
            comm_abort("ttprun doctor")
            return
        (getattr(backend, "abort", None) or backend._abort)()

    def has_ended(self, states: str) -> bool:
        """Wait at most 10 s until the other process is in one of these states of the kernel, or gone."""
        ends_s = time.monotonic() + 10.0
        while time.monotonic() < ends_s:
            try:
                if Path(f"/proc/{self.peer}/stat").read_text().rpartition(")")[2].split()[0] in states:
                    return True
            except OSError:
                return "Z" in states
            time.sleep(0.01)
        return False


def seconds(act: Callable[[], Any]) -> float:
    """Do something; returns how long that took."""
    began_s = time.monotonic()
    act()
    return time.monotonic() - began_s


def connect(rank: Rank) -> None:
    """The first collective makes the communicator."""
    say("connection", f"the first all-reduce took {seconds(rank.reduce):.2f} s")


def barrier(rank: Rank) -> None:
    """A synchronous operation without tensors, as scripts have it."""
    rank.dist.barrier()
    took_s = min(seconds(rank.dist.barrier) for _ in range(3))
    say("barrier", f"{took_s * 1e3:.2f} ms")


def abort(rank: Rank) -> None:
    """Rank 1 is stopped in the middle, and rank 0 must come out of its collective."""
    rank.reduce()
    rank.meet("before the stop")
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 has seen what it wants to see
        rank.abort()
        return
    try:
        if not rank.has_ended("T"):
            raise RuntimeError("the other rank did not stop")
        rank.begin_reduce()
        time.sleep(0.2)  # the operation is to have begun on the device
        aborted_s = seconds(rank.abort)
        idle_s = seconds(rank.synchronize)
        say(
            "abort",
            f"it took {aborted_s:.2f} s with a collective under way, and the device was idle {idle_s:.2f} s later",
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.peer, signal.SIGCONT)


def connect_again(rank: Rank) -> None:
    """Both make a new communicator, as after each recovery."""
    rank.meet("again")
    rank.group = rank.dist.new_group([0, 1])
    say("new communicator", f"with its first all-reduce {seconds(rank.reduce):.2f} s")


def lose_peer(rank: Rank) -> None:
    """Rank 1 is killed, and rank 0 must come out of a collective with it."""
    rank.meet("before the kill")
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if not rank.has_ended("ZX"):
        raise RuntimeError("the other rank did not die")
    began_s = time.monotonic()
    with contextlib.suppress(Exception):  # that it is refused at once is an answer too
        work = rank.begin_reduce()
        while not work.is_completed() and time.monotonic() < began_s + NOTICED_S:
            time.sleep(0.01)
    noticed_s = time.monotonic() - began_s
    saw = f"its loss is seen after {noticed_s:.2f} s" if noticed_s < NOTICED_S else "its loss is not seen by itself"
    freed_s = seconds(rank.abort) + seconds(rank.synchronize)
    say("killed peer", f"{saw}; an abort then took {freed_s:.2f} s")


STEPS: dict[str, Callable[[Rank], None]] = {
    "connection": connect,
    "barrier": barrier,
    "abort": abort,
    "new communicator": connect_again,
    "killed peer": lose_peer,
}

LIMIT_S = 60.0  # importing torch and a first context take most of it, where the machine is busy
NAMES = {"cuda": "NCCL", "npu": "HCCL", "cpu": "gloo"}
RANKS = "import sys; sys.path.append({!r}); from ttprun.cli.device_check import main; main()"
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
        first, other = self.indices
        where = f"two ranks on {self.kind} {first}" if self.shares else f"ranks on {self.kind} {first} and {other}"
        return f"{where}, {NAMES[self.kind]}{' over sockets' if self.shares and self.kind == 'cuda' else ''}"


def pair_of(probed: Mapping[str, Any]) -> Pair | None:
    """Which devices two ranks would use; None: there is none.

    probed  what `Probe.read` has returned
    """
    usable = [(device["kind"], device["index"]) for device in probed.get("devices", ()) if device["is_usable"]]
    for kind in ("cuda", "npu"):
        indices = [index for of, index in usable if of == kind]
        if indices:
            return Pair(kind, (indices[0], indices[1] if len(indices) > 1 else indices[0]))
    return None


def devices_at_work(probed: Mapping[str, Any], limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """A finding for each thing that two ranks try, as it comes. Blocks for `limit_s` and some seconds at most.

    Nothing of it remains, and nothing that runs on the devices is touched. Nothing is found where there is no device.
    """
    pair = pair_of(probed)
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
            what, result, is_well = told["what"], told["found"], told["is_well"]
        except (ValueError, KeyError, TypeError):
            continue  # a library that prints
        missing.remove(what)
        if not is_well:
            yield _failed(pair, what, result)
            return
        subject = f"{NAMES[pair.kind]}: {what}"
        yield Finding("devices", subject, f"{result} ({pair})" if what == "connection" else result)
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
    clean = clean_environment() | VARIABLES | {"OMP_NUM_THREADS": "1"}
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
