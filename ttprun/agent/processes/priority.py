"""A low priority for processes that prepare themselves while the ranks train; one that can be left again.

A process may always lower its priority. To raise it again by `nice` it needs CAP_SYS_NICE or RLIMIT_NICE, which a
container mostly does not give; so `nice` is used only where a thread of ours was allowed to leave it. The others can be
left by anybody: the scheduler's batch policy, the idle class for disks, and the nice value of the "autogroup", into
which Linux puts the processes of a session where that is switched on (there the `nice` of a process alone changes
nothing between sessions). Begin with `lower`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import cache
from pathlib import Path

import psutil

NICE = 5  # a quarter of a processor that a rank wants, too: with 19, next to busy ranks, it would never be ready
_BETWEEN_ORDERS_S = 0.11
_MOST_ORDERS = 8  # of which others, of this machine's other jobs, may come before each of ours
_AUTOGROUP = Path("/proc/self/autogroup")


def lower(pid: int) -> None:
    """Let a process, which leads a session, run when nobody else wants to. What cannot be had is done without.

    Blocks for a tenth of a second at most, if nobody else on this machine sets priorities; else for a second.
    """
    _set_autogroup(pid, str(NICE))
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # the job has been given a policy on purpose
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(pid).ionice(psutil.IOPRIO_CLASS_IDLE)
    for task in _tasks_of(pid):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(task, os.SCHED_BATCH, os.sched_param(0))
        if _can_be_nice():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, task, NICE)


def restore(pid: int) -> None:
    """Give a process our own priority again. Blocks as `lower` does."""
    _set_autogroup(pid, _own_autogroup_nice())
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(pid).ionice(*psutil.Process().ionice())
    for task in _tasks_of(pid):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))
        if _can_be_nice():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, task, os.getpriority(os.PRIO_PROCESS, 0))


def _own_autogroup_nice() -> str:
    """The nice value of this process's autogroup; "0" where the kernel keeps none: it may then show an empty file."""
    try:
        fields = _AUTOGROUP.read_text().split()
    except OSError:
        fields = []
    return fields[-1] if fields else "0"


def _set_autogroup(pid: int, nice: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{pid}/autogroup", os.O_WRONLY)
        try:
            for _ in range(_MOST_ORDERS):
                try:
                    os.write(fd, nice.encode())
                    return
                except BlockingIOError:  # without privilege Linux takes ten orders a second, of all processes together
                    time.sleep(_BETWEEN_ORDERS_S)
        finally:
            os.close(fd)


def _tasks_of(pid: int) -> list[int]:
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


@cache
def _can_be_nice() -> bool:
    """Whether this process may lower a nice value that it has raised. A thread tries it, for itself alone."""
    answers: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            before = os.getpriority(os.PRIO_PROCESS, own)
            os.setpriority(os.PRIO_PROCESS, own, before + 1)
            os.setpriority(os.PRIO_PROCESS, own, before)
            answers.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(answers)
