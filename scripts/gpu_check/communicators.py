"""How long a new communicator takes, and an abort, as a script of ranks; rank 0 prints a line of JSON for each.

    torchrun --nproc-per-node 2 communicators.py --device cuda --backend nccl

A recovery aborts the communicators of all groups and makes new ones. `new` lasts until the first all-reduce is
complete: NCCL connects there. `abort` is of a communicator at rest, `busy` of one whose peers have not come to the
all-reduce (NCCL, two ranks or more). gloo is not aborted, as that wakes nobody: ttprun shuts its sockets. Begin with
main().
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ttprun.device.device_errors import NCCL_VARIABLES

ELEMENTS = 1 << 20
STUCK_S = 25  # then the stacks are printed, once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--share", action="store_true", help="all ranks use one GPU")
    args = parser.parse_args()
    if args.share:
        os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ.update(NCCL_VARIABLES)
    if args.device != "cpu":
        module = torch.get_device_module(args.device)
        module.set_device(int(os.environ["LOCAL_RANK"]) % module.device_count())
    dist.init_process_group("gloo")  # to meet by
    tensor = torch.ones(ELEMENTS, device=args.device)
    faulthandler.dump_traceback_later(STUCK_S)
    for _ in range(args.repeats):
        group, seconds = connect(args.backend, tensor)
        say("new", seconds)
        if args.backend != "gloo":
            say("abort", abort(group, tensor.device))
    if args.backend == "nccl" and dist.get_world_size() > 1:
        group, _ = connect(args.backend, tensor)
        if dist.get_rank() == 0:
            dist.all_reduce(tensor, group=group, async_op=True)
        dist.barrier()
        say("busy", abort(group, tensor.device))
    dist.barrier()
    os._exit(0)  # an aborted group has nothing left that could be destroyed


def say(what: str, seconds: float) -> None:
    """Rank 0 prints one figure, so that those before a hang are known."""
    if dist.get_rank() == 0:
        print(json.dumps({"what": what, "seconds": seconds}), flush=True)


def connect(backend: str, tensor: torch.Tensor) -> tuple[Any, float]:
    """A group of all ranks that has reduced a tensor, and the seconds that this took."""
    dist.barrier()
    began_s = time.perf_counter()
    group = dist.new_group(backend=backend)
    dist.all_reduce(tensor, group=group)
    if tensor.device.type != "cpu":
        torch.get_device_module(tensor.device.type).synchronize()
    return group, time.perf_counter() - began_s


def abort(group: Any, device: torch.device) -> float:
    """Abort a group's communicator; returns the seconds that this took."""
    began_s = time.perf_counter()
    group._get_backend(device).abort()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
