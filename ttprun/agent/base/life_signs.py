"""What the system shows of a process: the first sign of its end, and why it has ended.

The first sign of a rank's end: the lock that it held as long as it lived has lost its holder (`watch`). At that moment
the process runs no code any more, and what it has left on the board, in its recorder and on its line is final; but its
memory, sockets and devices are still being given back. So the others can be ordered to stop, and its replacement has to
wait. Why it has ended is known by `Causes`: out of memory, a crash, a signal from outside. The kernel's out-of-memory
killer sends SIGKILL like anybody else; the memory events of the control group show that it was the sender, or the
kernel's log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ttprun.protocol.board import Board, Field
from ttprun.tensors.memory import CGROUPS, own_cgroup

HOLDER_MASK = 0x3FFFFFFF
PF_EXITING = 0x4
_LOOK_AGAIN_S = 60.0
_EXITING_LIMIT_S = 0.1
_EXITING_EVERY_S = 0.0005
_TICKS_PER_S = 100.0  # of /proc/PID/stat, on every Linux that we run on


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
            if all(fields[0] != "R" for fields in _threads(pid)):
                return
            time.sleep(_EXITING_EVERY_S)


def _threads(pid: int) -> Iterator[list[str]]:
    """As `_stat`, of each thread of a process. Raises OSError if there is no such process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just gone
            yield _stat(f"/proc/{pid}/task/{thread}/stat")


def is_exiting(pid: int) -> bool:
    """Whether no thread of a process will run any code of its own again. Raises OSError if there is no such process."""
    return all(int(fields[6]) & PF_EXITING for fields in _threads(pid))


def state_of(pid: int) -> tuple[str, float]:
    """State letter of a process ("T": stopped by a signal, "t": by a debugger, "D": in IO) and its processor time.

    Raises OSError if there is no such process.
    """
    fields = _stat(f"/proc/{pid}/stat")
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def has_ended(pid: int) -> bool:
    """Whether a rank's process is gone, or on its way out; 0 is none."""
    try:
        return pid > 0 and is_exiting(pid)
    except OSError:
        return True


def _stat(path: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on."""
    return Path(path).read_text(errors="replace").rpartition(")")[2].split()


KERNEL_LOG = Path("/dev/kmsg")
CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_WORDS = {
    signal.SIGSEGV: "crashed in native code",
    signal.SIGBUS: "crashed in native code, or its shared memory is full",
    signal.SIGILL: "crashed in native code",
    signal.SIGFPE: "crashed in native code",
    signal.SIGABRT: "aborted by native code",
    signal.SIGTERM: "sent from outside this job",
}


class Causes:
    """Knows what has changed since the last look.

    cgroup   the directory of our control group; None: found out
    """

    def __init__(self, cgroup: Path | None = None, kernel_log: Path = KERNEL_LOG) -> None:
        self._cgroup = cgroup if cgroup is not None else own_cgroup()
        self._kernel_log = kernel_log
        self._oom_kills = self._count_oom_kills()

    def of_signal(self, number: int, pid: int) -> str:
        """Why a signal has ended a process, "" if that is not known.

        number   of the signal
        pid      of the process, which has ended; of SIGKILL it is asked whether memory was short
        """
        if number == signal.SIGKILL:
            return self._of_memory(pid)
        with contextlib.suppress(ValueError):
            name = signal.Signals(number)
            return f"{name.name}, {_WORDS[name]}" if name in _WORDS else name.name
        return ""

    def _of_memory(self, pid: int) -> str:
        kills, before = self._count_oom_kills(), self._oom_kills
        self._oom_kills = kills
        if kills > before:
            return "out of memory (cgroup limit)"
        if re.search(rf"Killed process {pid}\b", self._read_kernel_log()):
            return "out of memory (the kernel's log says so)"
        return ""

    def _count_oom_kills(self) -> int:
        """Processes that the kernel has killed for memory in our control group; version 2, then 1."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, TypeError):
                match = re.search(r"^oom_kill (\d+)$", (self._cgroup or CGROUPS).joinpath(name).read_text(), re.M)
                if match:
                    return int(match[1])
        return 0

    def _read_kernel_log(self) -> str:
        """The newest messages, "" if we may not read them."""
        messages: list[bytes] = []
        with contextlib.suppress(OSError):
            fd = os.open(self._kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                while len(messages) < 20000 and (message := os.read(fd, 8192)):
                    messages.append(message)
            except BlockingIOError:
                pass
            finally:
                os.close(fd)
        return b"".join(messages[-500:]).decode(errors="replace")
