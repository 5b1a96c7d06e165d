"""An error of a DataLoader's connection to one of its workers: the worker was killed while the rank fetched from it.

torch reports a dead worker itself, in words by which `ttprun.recovery` knows that the script has not failed. But a
process that is being killed closes its connections a moment before its parent can see that it is dead; then the script
ends with "connection reset", "refused", or at the end of the stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ttprun.introspect.frames import variables_of

_DEATH_LIMIT_S = 1.0  # of a worker that has closed its connections


def lost_worker(error: BaseException) -> str:
    """The death of a DataLoader's worker that shows as this error, in torch's words; "" if it is none.

    error   that has ended the script, with its traceback

    What a script's own data raises comes from frames of its own, or from torch's where a worker has passed it on; the
    loss of a connection comes from those of multiprocessing.

    Blocks for _DEATH_LIMIT_S at most, and only if the error came out of a DataLoader's connection.
    """
    trace = error.__traceback__ if isinstance(error, (OSError, EOFError)) else None
    loader, innermost = None, ""
    while trace is not None:
        innermost = trace.tb_frame.f_globals.get("__name__", "")
        if loader is None and innermost == "torch.utils.data.dataloader":
            loader = variables_of(trace.tb_frame).get("self")
        trace = trace.tb_next
    if loader is None or not innermost.startswith("multiprocessing."):
        return ""
    killed = _killed_one(getattr(loader, "_workers", ()))
    return "" if killed is None else f"DataLoader worker (pid {killed.pid}) exited unexpectedly"


def _killed_one(workers: Sequence[Any]) -> Any:
    """A worker that a signal has ended, or ends within _DEATH_LIMIT_S; those that have done their work do not count."""
    from multiprocessing.connection import wait  # torch has imported it; a script that has no DataLoader need not

    ends_s = time.monotonic() + _DEATH_LIMIT_S
    running = {worker.sentinel: worker for worker in workers}
    while running and (ended := wait(list(running), max(0.0, ends_s - time.monotonic()))):
        for sentinel in ended:
            worker = running.pop(sentinel)
            if (worker.exitcode or 0) < 0:
                return worker
    return None
