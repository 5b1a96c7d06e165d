"""Why a process has ended, as far as the system shows: out of memory, a crash, a signal from outside.

The kernel's out-of-memory killer sends SIGKILL like anybody else. The memory events of the
control group show that it was the sender, or the kernel's log where it may be read.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from ttprun.tensors.memory import CGROUPS, own_cgroup

KERNEL_LOG = Path("/dev/kmsg")
_CRASHES = {
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
            return f"{name.name}, {_CRASHES[name]}" if name in _CRASHES else name.name
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
