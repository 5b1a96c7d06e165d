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
_MOST_ORDERS = 16
_AUTOGROUP = Path("/proc/self/autogroup")
_lock = threading.Lock()
_pending: dict[int, str] = {}  # process -> nice value of its autogroup, which the kernel has not taken yet


def lower(pid: int) -> None:
    """Let a process, which leads a session, run when nobody else wants to. What cannot be had is done without."""
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
    """Give a process our own priority again."""
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
    """Order it; if the kernel takes others' orders first, a thread orders it again: recovery does not wait for it."""
    with _lock:
        is_pending = pid in _pending
        if _is_answered(pid, nice):
            _pending.pop(pid, None)
            return
        _pending[pid] = nice
    if not is_pending:
        threading.Thread(target=_insist, args=(pid,), name="ttprun-priority", daemon=True).start()


def _insist(pid: int) -> None:
    """Give the newest order for a process again, until it is taken, or _MOST_ORDERS times."""
    for _ in range(_MOST_ORDERS):
        time.sleep(_BETWEEN_ORDERS_S)
        with _lock:
            if pid not in _pending or _is_answered(pid, _pending[pid]):
                break
    with _lock:
        _pending.pop(pid, None)


def _is_answered(pid: int, nice: str) -> bool:
    """Give one order; returns whether it is of no use to give it again."""
    try:
        fd = os.open(f"/proc/{pid}/autogroup", os.O_WRONLY)
        try:
            os.write(fd, nice.encode())
        finally:
            os.close(fd)
    except BlockingIOError:  # without privilege Linux takes ten such orders a second, of all processes together
        return False
    except OSError:
        pass  # there are no such groups, or the process has ended
    return True


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
