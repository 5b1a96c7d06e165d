"""Children that the agent has not started itself: copies of a standby, whose parent the kernel makes the agent.

A standby forks twice; the process in between ends, and with it the copy would become a child of init, as every orphan
does, if the agent were not a "child subreaper" at that moment. As a child of the agent a copy is all that a rank is
that the agent has started itself: it can be waited for, and it ends with the agent (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import subprocess
import threading
from collections.abc import Iterator

PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Orphans among this process's descendants become its children meanwhile, and not those of init.

    Not for good: what a rank leaves behind would wait here for somebody to take its exit code.
    Raises OSError if the kernel will not have it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class AdoptedProcess:
    """What torch and we use of subprocess.Popen, for a child that is known by its number only. For any thread.

    returncode   exit code, or minus the signal that ended it; None until somebody has waited for it
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._taking = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        with self._taking:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        code = self.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError):  # another thread has waited for it meanwhile
                pidfd = os.pidfd_open(self.pid)
                try:
                    ended = select.poll()
                    ended.register(pidfd, select.POLLIN)
                    ended.poll(None if timeout is None else timeout * 1000)
                finally:
                    os.close(pidfd)
            code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(["rank"], timeout or 0.0)
        return code
