"""The Python stacks of this rank's threads, for the agent, which reads them from a memfd.

A thread of ours writes them when the agent asks (`heartbeat`): it holds the GIL, so no other thread changes its frames
meanwhile. If it does not get the GIL, whoever has it makes no progress, and the agent sends SIGNAL, whose handler in C
needs none. With a GIL that is passed around that handler may read a frame that another thread is just leaving, and
crash the rank: 2 of 1900 times with three busy threads (Python 3.11). The same file gets the stack of a crash (SIGSEGV,
SIGABRT and the like), unless the user has asked for faulthandler himself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal

SIGNAL = signal.SIGRTMAX - 7  # the C library uses the lowest real-time signals; debuggers and runtimes, the low half

_has_enabled = False
_fd = -1


def write_when_asked(fd: int) -> None:
    """Write the stacks of all threads to `fd` from now on: at `write`, whenever SIGNAL comes, and in a crash."""
    global _has_enabled, _fd
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
        _fd = fd
        if not faulthandler.is_enabled():
            faulthandler.enable(file=fd, all_threads=True)
            _has_enabled = True


def write() -> None:
    """Write them now; nothing if no file was named."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if _fd >= 0:
            faulthandler.dump_traceback(_fd, all_threads=True)


def forget() -> None:
    """In a forked child, which has closed the file: stop writing to its descriptor, which may be reused."""
    global _fd
    _fd = -1
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        faulthandler.unregister(SIGNAL)
        if _has_enabled:
            faulthandler.disable()
