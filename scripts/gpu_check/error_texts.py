"""Real errors of a device and of its communication, and what our table (`ttprun.device.device_errors`) makes of them.

    python error_texts.py --cause "an address that is not mapped"      one of them, in a process of its own

Most errors of a kernel end what a process can do with its GPU, so each is caused in a new one. Begin with `CAUSES` and
`provoke`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ttprun.device.device_errors import NCCL_VARIABLES, DeviceErrors, in_one_line

LIMIT_S = 120.0
PEER_LIMIT_S = 20
SHARES = "GPU_CHECK_SHARES"  # in the environment: ranks share a GPU, and NCCL is told that they are on two machines
KERNEL = 'extern "C" __global__ void broken(int *words) {{ {} }}'


def _run_kernel(statement: str) -> None:
    """Compile and run one statement on the GPU, whose `words` are 16 integers."""
    import torch

    broken = torch.cuda._compile_kernel(KERNEL.format(statement), "broken")
    broken((1, 1, 1), (1, 1, 1), (torch.zeros(16, dtype=torch.int32, device="cuda"),))
    torch.cuda.synchronize()


def _use_a_wrong_index() -> None:
    import torch

    torch.zeros(4, device="cuda").gather(0, torch.tensor([9], device="cuda"))
    torch.cuda.synchronize()


def _ask_for_too_much() -> None:
    import torch

    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def _lose_a_peer(backend: str, device: str) -> None:
    """Wait in an all-reduce for a process that is killed instead of coming."""
    import torch
    import torch.distributed as dist

    from ttprun.groups.device_link import LateWork

    os.environ.update(NCCL_VARIABLES)  # what ttprun's ranks have; else the watchdog ends the process
    with tempfile.TemporaryDirectory() as folder:
        rank = 1 if os.fork() == 0 else 0
        signal.alarm(int(LIMIT_S))  # neither outlives a check that hangs
        if SHARES in os.environ:
            os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        place = device if device == "cpu" else f"{device}:{rank % torch.cuda.device_count()}"
        limit = timedelta(seconds=PEER_LIMIT_S)
        dist.init_process_group(backend, f"file://{folder}/store", limit, rank=rank, world_size=2)
        tensor = torch.ones(1, device=place)
        dist.all_reduce(tensor)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(tensor, async_op=True)
        # gloo's own wait raises; NCCL's does not, so the error is had as ttprun has it.
        (work if backend == "gloo" else LateWork(SimpleNamespace(is_aborted=False), work)).wait(limit)


@dataclass(frozen=True)
class Provocation:
    """An error, and what the table must say of it.

    cause    what is done
    devices  how many GPUs it needs
    faults   the table's names for it, any of them; "": it is no error of the device
    act      causes it
    """

    cause: str
    devices: int
    faults: tuple[str, ...]
    act: Callable[[], None]


# NCCL sees it in its sockets; over NVLink or shared memory it sees nothing, and the time limit ends the wait.
_LOST_PEER = ("remote-suspect", "link", "collective-timeout")
_LOST = ("device-lost",)
CAUSES = {
    provocation.cause: provocation
    for provocation in (
        Provocation("a peer is killed, gloo", 0, ("link",), partial(_lose_a_peer, "gloo", "cpu")),
        Provocation("a peer is killed, gloo, tensors on the GPU", 1, ("link",), partial(_lose_a_peer, "gloo", "cuda")),
        Provocation("a peer is killed, NCCL", 2, _LOST_PEER, partial(_lose_a_peer, "nccl", "cuda")),
        Provocation("an index out of range", 1, _LOST, _use_a_wrong_index),
        Provocation("an address that is not mapped", 1, _LOST, partial(_run_kernel, "*(int *)16 = 1;")),
        Provocation("a misaligned address", 1, _LOST, partial(_run_kernel, "*(int *)((char *)words + 1) = 1;")),
        Provocation("a trap", 1, _LOST, partial(_run_kernel, "__trap();")),
        Provocation("more memory than there is", 1, ("",), _ask_for_too_much),
    )
}


@dataclass(frozen=True)
class Text:
    """An error as it was raised.

    text   its type and first line; "" if none was raised
    fault  what the table says of it
    """

    cause: str
    text: str
    fault: str

    @property
    def is_known(self) -> bool:
        """Whether an error was raised, and the table says of it what it must."""
        return bool(self.text) and self.fault in CAUSES[self.cause].faults


def provoke(cause: str, shares: bool = False, limit_s: float = LIMIT_S) -> Text:
    """Cause an error in a process of its own.

    shares  whether two ranks use one GPU
    """
    command = [sys.executable, __file__, "--cause", cause]
    environment = os.environ | ({SHARES: "1"} if shares else {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Text(cause, "", f"nothing was raised within {limit_s:.0f} s")
    finally:
        _end_family(process)
    lines = out.splitlines()
    if process.returncode or not lines:
        last = (err.strip().splitlines() or ["no output"])[-1]
        return Text(cause, "", f"exit code {process.returncode}: {last}")
    return Text(cause, **json.loads(lines[-1]))


def _end_family(process: subprocess.Popen[str]) -> None:
    """End it and the peer that it has forked, which may be stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


def main() -> None:
    """Cause one error, and print its text and the table's answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cause", required=True, choices=list(CAUSES))
    try:
        CAUSES[parser.parse_args().cause].act()
    except Exception as error:
        print(json.dumps({"text": in_one_line(error), "fault": DeviceErrors({}).diagnose(error).name}), flush=True)
    # A broken context may make the end of a process an error of its own.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
