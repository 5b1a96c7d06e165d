"""A file in the agent's shared memory, kept mapped from one snapshot to the next.

Its pages are what a snapshot costs the first time, several times the copy itself: so they are kept, and written over.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy


class Memory:
    """One such file.

    path   of the agent's descriptor, under /proc
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: Any = None
        self._size = 0
        self._address = 0

    def held_bytes(self) -> int:
        """What it takes of the machine's memory now. Raises OSError."""
        return os.stat(self._path).st_blocks * 512

    def fill(self, size_bytes: int, content: Iterable[memoryview]) -> None:
        """Make the file's content so many bytes; chunks are contiguous, each is used up before the next is asked for.

        Raises OSError, also if there is no memory for it; the content is not the old one then.
        """
        self.fit(size_bytes)
        at = self._address
        end = at + size_bytes
        for chunk in content:
            if at + chunk.nbytes > end:
                raise ValueError(f"more than {size_bytes} bytes for {self._path}")
            ctypes.memmove(at, numpy.frombuffer(chunk, numpy.uint8).ctypes.data, chunk.nbytes)  # lets the GIL go
            at += chunk.nbytes

    def write(self, content: bytes) -> None:
        """Write to the beginning of the file, which `fit` has made large enough."""
        self._map[: len(content)] = content

    def copy(self, at: int, address: int, size_bytes: int) -> None:
        """Write so many bytes from an address to a place in the file, which `fit` has made large enough."""
        if at + size_bytes > self._size:
            raise ValueError(f"more than {self._size} bytes for {self._path}")
        ctypes.memmove(self._address + at, address, size_bytes)  # lets the GIL go

    def fit(self, size_bytes: int) -> None:
        """Make the file so many bytes long. Raises OSError, also if there is no memory for it."""
        if size_bytes == self._size:
            return
        self._map, self._size = None, 0
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)  # no memory is an error here, and would be a SIGBUS later
            self._map = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(fd)
        self._map.madvise(mmap.MADV_DONTFORK)  # a DataLoader's worker would hold the memory longer than we do
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._size = size_bytes
