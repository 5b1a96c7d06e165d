"""Memory that outlives the ranks that write to it; for snapshots taken from the system before the ranks need it.

New pages cost several times what is copied into them: the ranks would wait for it at their first two snapshots.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from ttprun.tensors.memory import free_bytes

_SLICE_BYTES = 64 << 20
_NICEST = 19


def new(name: str, count: int) -> list[int]:
    """So many empty files in memory: their descriptors."""
    return [os.memfd_create(f"ttprun-{name}", os.MFD_CLOEXEC) for _ in range(count)]


def path_of(fd: int) -> str:
    """Under which path other processes of this user can open a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def take_ahead(files: Sequence[int], size_bytes: int) -> threading.Thread:
    """Give each file in memory so many bytes, on a thread of its own that makes way for all others.

    files   descriptors; they may be closed meanwhile, but whoever writes to them waits for the thread's end: it would
            make a file that is smaller longer

    Where there is not enough memory nothing is taken: whoever needs it will say so.
    """
    own = [os.dup(fd) for fd in files]
    thread = threading.Thread(target=_take, args=(own, size_bytes), name="ttprun-memory", daemon=True)
    thread.start()
    return thread


def _take(files: list[int], size_bytes: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)
    try:
        free = free_bytes()
        if free is None or size_bytes * len(files) <= free:
            with contextlib.suppress(OSError):
                for fd in files:
                    for at in range(0, size_bytes, _SLICE_BYTES):
                        os.posix_fallocate(fd, at, min(_SLICE_BYTES, size_bytes - at))
    finally:
        for fd in files:
            os.close(fd)
