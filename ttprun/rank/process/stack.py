"""The Python stack of this rank, for the agent: written by a signal handler in C, so that it needs no GIL.

The agent sends SIGNAL to a rank that hangs, and reads the memfd. The same file gets the stack of a crash (SIGSEGV,
SIGABRT and the like), unless the user has asked for faulthandler himself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal

SIGNAL = signal.SIGRTMAX - 7  # the C library uses the lowest real-time signals; debuggers and runtimes, the low half

_has_enabled = False


def write_when_asked(fd: int) -> None:
    """Write the stacks of all threads to `fd` whenever SIGNAL comes, and when the process crashes."""
    global _has_enabled
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=fd, all_threads=True)
            _has_enabled = True


def forget() -> None:
    """In a forked child, which has closed the file: stop writing to its descriptor, which may be reused."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        faulthandler.unregister(SIGNAL)
        if _has_enabled:
            faulthandler.disable()
