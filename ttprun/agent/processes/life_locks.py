"""The first sign of a rank's end: the lock that it held as long as it lived has lost its holder (`life_lock`).

At that moment the process runs no code any more, and what it has left on the board, in its recorder and on its line is
final; but its memory, sockets and devices are still being given back. So the others can be ordered to stop, and its
replacement has to wait. Begin with `watch`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ttprun.protocol.board import Board, Field

HOLDER_MASK = 0x3FFFFFFF
PF_EXITING = 0x4
_LOOK_AGAIN_S = 60.0
_EXITING_LIMIT_S = 0.1
_EXITING_EVERY_S = 0.0005


def watch(board: Board, row: int, pid: int, report: Callable[[int], None]) -> None:
    """Have `report` called, on a thread of its own, once the process is bound to end.

    report   given its exit code, or minus the signal that ends it

    Not called if the process has no such lock, or if that cannot be known: its pidfd then has to do.
    """
    lock = board.get(row, Field.LIFE)
    if lock & HOLDER_MASK:
        threading.Thread(
            target=_watch, args=(board, row, lock, pid, report), name=f"ttprun-life-{row}", daemon=True
        ).start()


def _watch(board: Board, row: int, lock: int, pid: int, report: Callable[[int], None]) -> None:
    while board.get(row, Field.LIFE) == lock:
        board.wait_for_change(row, Field.LIFE, lock, _LOOK_AGAIN_S)
    code = ending_code(pid)
    if code is not None:
        report(code)


def ending_code(pid: int) -> int | None:
    """How a dying process ends, once all of its threads are on their way out; None if that is not so before long.

    A process that executes another program lets go of its locks as well, and lives.
    """
    give_up_at_s = time.monotonic() + _EXITING_LIMIT_S
    with contextlib.suppress(OSError, ValueError, IndexError):
        while not is_exiting(pid):
            if time.monotonic() > give_up_at_s:
                return None
            time.sleep(_EXITING_EVERY_S)
        return os.waitstatus_to_exitcode(int(_stat(f"/proc/{pid}/stat")[49]))
    return None


def let_stop(pid: int) -> None:
    """A process was sent SIGKILL or SIGSTOP: wait until none of its threads runs the script's code, 0.1 s at most.

    One that runs on a processor is interrupted within microseconds; one that waits in the kernel runs nothing before it
    takes the signal, however long it waits.
    """
    give_up_at_s = time.monotonic() + _EXITING_LIMIT_S
    with contextlib.suppress(OSError, ValueError, IndexError):
        while time.monotonic() < give_up_at_s and not is_exiting(pid):
            if all(state != "R" for state in _states(pid)):
                return
            time.sleep(_EXITING_EVERY_S)


def _states(pid: int) -> Iterator[str]:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield _stat(f"/proc/{pid}/task/{thread}/stat")[0]


def is_exiting(pid: int) -> bool:
    """Whether no thread of a process will run any code of its own again. Raises OSError if there is no such process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just gone
            if not int(_stat(f"/proc/{pid}/task/{thread}/stat")[6]) & PF_EXITING:
                return False
    return True


def has_ended(pid: int) -> bool:
    """Whether a rank's process is gone, or on its way out; 0 is none."""
    try:
        return pid > 0 and is_exiting(pid)
    except OSError:
        return True


def _stat(path: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on."""
    return Path(path).read_text(errors="replace").rpartition(")")[2].split()
