"""Kill a piece of work at each of its system calls that finds its files changed: the first call, then each next one.

The work runs in a fork of this process, which the kernel stops before each call (ptrace). Between two calls nothing on
the disk changes, so what these kills leave is all that any kill can leave. Begin with `killed_at_each_change`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

_TRACEME, _TO_NEXT, _SET_OPTIONS = 0, 24, 0x4200
_MARK_CALLS, _END_WITH_US = 1, 0x100000  # PTRACE_O_TRACESYSGOOD, PTRACE_O_EXITKILL
_AT_CALL = signal.SIGTRAP | 0x80
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


def why_not_traced() -> str:
    """Why no process can be traced here, in one line; "" if one can."""
    try:
        _run(lambda: None, Path("/none"), 1)
    except OSError as error:
        return f"NOT TESTED: kills at system calls (ptrace: {error.strerror})"
    return ""


def killed_at_each_change(
    folder: Path, prepare: Callable[[Path], object], work: Callable[[Path], object]
) -> Iterator[Path]:
    """Yield a place as the work has left it, killed after no change of it, after one, and so on; at last whole.

    folder    gets a place for each attempt
    prepare   makes the place as the work finds it
    """
    count, was_killed = 0, True
    while was_killed:
        place = folder / str(count)
        prepare(place)
        was_killed = _run(lambda place=place: work(place), place, count)  # type: ignore[misc]
        yield place
        count += 1


def _run(work: Callable[[], object], place: Path, changes: int) -> bool:
    """Whether it was killed after so many changes; else it has ended. Raises OSError if nothing is traced here."""
    seen = _content(place)
    pid = os.fork()
    if not pid:
        _be_traced(work)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        raise OSError(os.waitstatus_to_exitcode(status), os.strerror(os.waitstatus_to_exitcode(status)))
    _ptrace(_SET_OPTIONS, pid, None, ctypes.c_void_p(_MARK_CALLS | _END_WITH_US))
    while True:
        _ptrace(_TO_NEXT, pid, None, None)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            assert status == 0, "the work has failed"
            return False
        assert os.WSTOPSIG(status) == _AT_CALL, "the work got a signal"
        seen, before = _content(place), seen
        changes -= seen != before
        if changes == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True


def _be_traced(work: Callable[[], object]) -> None:
    """Never returns."""
    code = 1
    try:
        if _ptrace(_TRACEME, 0, None, None):
            os._exit(ctypes.get_errno())
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
        code = 0
    finally:
        os._exit(code)


def _content(place: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> mode and bytes of all that is in a folder."""
    return {
        os.path.join(folder, name): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for folder, folders, files in os.walk(place)
        for name in (*folders, *files)
        if (path := Path(folder, name))
    }
