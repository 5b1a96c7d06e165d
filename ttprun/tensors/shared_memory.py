"""A file in the agent's shared memory, kept mapped from one snapshot to the next and overwritten.

Allocating its pages costs several times as much as the copy itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy
import torch


class Memory:
    """One such file; `path` is that of the agent's descriptor, under /proc."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: Any = None
        self._size = 0
        self._address = 0

    def held_bytes(self) -> int:
        """Bytes of memory that the file occupies. Raises OSError."""
        return os.stat(self._path).st_blocks * 512

    def fill(self, size_bytes: int, content: Iterable[memoryview]) -> None:
        """Overwrite the file with `size_bytes` of contiguous chunks; each is copied before the next is asked for.

        Raises OSError, also if memory is short; the old content is lost then.
        """
        self.fit(size_bytes)
        at = self._address
        end = at + size_bytes
        for chunk in content:
            if at + chunk.nbytes > end:
                raise ValueError(f"more than {size_bytes} bytes for {self._path}")
            ctypes.memmove(at, numpy.frombuffer(chunk, numpy.uint8).ctypes.data, chunk.nbytes)  # releases the GIL
            at += chunk.nbytes

    @property
    def size(self) -> int:
        """Bytes of the file that are mapped."""
        return self._size

    def write(self, content: bytes, at: int = 0) -> None:
        """Write from an offset of the file on, which `fit` has made large enough."""
        self._map[at : at + len(content)] = content

    def read(self, at: int, size_bytes: int) -> bytes:
        """So many bytes from an offset of the file, which is open."""
        found: bytes = self._map[at : at + size_bytes]
        return found

    def tensor(self, at: int, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of the form of another one, whose elements are in the file from an offset on.

        Raises ValueError if the file is too small.
        """
        if at + like.nbytes > self._size:
            raise ValueError(f"more than {self._size} bytes for {self._path}")
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=at).view(like.shape)

    def copy(self, at: int, address: int, size_bytes: int) -> None:
        """Copy memory of this process into the file, which `fit` has made large enough.

        at        offset in the file, in bytes
        address   of the first byte, on the CPU

        Raises ValueError if the file is too small.
        """
        if at + size_bytes > self._size:
            raise ValueError(f"more than {self._size} bytes for {self._path}")
        ctypes.memmove(self._address + at, address, size_bytes)  # releases the GIL

    def open(self) -> None:
        """Map what another process has written. Raises OSError, ValueError if it is empty."""
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self._size, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)

    def release(self) -> None:
        """Give all memory of the file back; no tensor in it may be used any more. Raises OSError."""
        self._map, self._size = None, 0
        os.truncate(self._path, 0)

    def fit(self, size_bytes: int) -> None:
        """Set the file's size. Raises OSError, also if memory is short."""
        if size_bytes == self._size:
            return
        self._map, self._size = None, 0
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)  # too little memory is an error here; it would be a SIGBUS later
            self._map = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(fd)
        self._map.madvise(mmap.MADV_DONTFORK)  # or a DataLoader's worker would hold the memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._size = size_bytes
