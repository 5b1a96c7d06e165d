"""A file in the agent's shared memory, kept mapped from one snapshot to the next and overwritten.

Allocating its pages costs several times as much as the copy itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

from ttprun.device import accelerator
from ttprun.state.files import opened

_PINNED_BYTES = 256 << 20  # at once

# How much memory can still be allocated, by the limits of the machine and of this process's control group.
#
# A group's memory includes its page cache; the part that the kernel would reclaim first counts as free.


CGROUPS = Path("/sys/fs/cgroup")
MACHINE = Path("/proc/meminfo")
# The files of limit and use, and memory.stat's name for the inactive page cache: cgroup version 2, then version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(machine: Path = MACHINE, cgroup: Path | None = None) -> int | None:
    """Bytes that can be allocated before the kernel has to kill something; None if unknown.

    cgroup   directory of our control group; None: this process's
    """
    amounts = [free for free in (_of_machine(machine), _of_cgroup(cgroup or own_cgroup())) if free is not None]
    return min(amounts, default=None)


def _of_machine(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.M)
        return int(match[1]) << 10 if match else None
    return None


def _of_cgroup(cgroup: Path | None) -> int | None:
    """The least over the group and its parents, whose limits hold too."""
    if cgroup is None:
        return None
    amounts = []
    for group in (cgroup, *cgroup.parents):
        for limit_name, used_name, cache_name in _CGROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
                limit, used = (int((group / name).read_text()) for name in (limit_name, used_name))
                cache = re.search(rf"^{cache_name} (\d+)$", (group / "memory.stat").read_text(), re.M)
                amounts.append(max(0, limit - used + (int(cache[1]) if cache else 0)))
    return min(amounts, default=None)


def own_cgroup(listing: Path = Path("/proc/self/cgroup")) -> Path | None:
    """The directory of this process's (memory) control group, None if it has none."""
    with contextlib.suppress(OSError):
        for line in listing.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                place = CGROUPS / path.lstrip("/")
            elif "memory" in controllers.split(","):
                place = CGROUPS / "memory" / path.lstrip("/")
            else:
                continue
            # In a container the path may be that of the host, and the mount is our own group.
            return place if place.is_dir() else (CGROUPS / "memory" if controllers else CGROUPS)
    return None


class Memory:
    """One such file; `path` is that of the agent's descriptor, under /proc."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: Any = None
        self._size = 0
        self._address = 0
        self._pinned: list[int] = []  # addresses of pieces, from the first one on
        self._is_pinnable = True

    def held_bytes(self) -> int:
        """Bytes of memory that the file occupies. Raises OSError."""
        return os.stat(self._path).st_blocks * 512

    def fill(self, size_bytes: int, content: Iterable[memoryview]) -> None:
        """Overwrite the file with `size_bytes` of contiguous chunks; each is copied before the next is asked for.

        Raises OSError, also if memory is short; the old content is lost then.
        """
        self.fit(size_bytes)
        at = 0
        for chunk in content:
            self.copy(at, numpy.frombuffer(chunk, numpy.uint8).ctypes.data, chunk.nbytes)
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
        return bytes(self._map[at : at + size_bytes])

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
        with opened(self._path) as fd:
            self._map_all(fd, mmap.MAP_SHARED)

    def _map_all(self, fd: int, flags: int) -> None:
        self._map = mmap.mmap(fd, 0, flags=flags)
        self._size = len(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def release(self) -> None:
        """Give all memory of the file back; no tensor in it may be used any more. Raises OSError."""
        self.unmap()
        os.truncate(self._path, 0)

    def unmap(self) -> None:
        """Let go of it here; what is in the file stays. No tensor in it may be used any more."""
        for address in self._pinned:
            accelerator.unpin(address)
        self._pinned, self._is_pinnable = [], True
        self._map, self._size = None, 0

    def pin_more(self) -> None:
        """Let the device copy to one more piece of it by itself, if it can: that takes a moment for each.

        On the thread that maps it, and by which alone it is unmapped.
        """
        at = len(self._pinned) * _PINNED_BYTES
        if at < self._size and self._is_pinnable:
            self._is_pinnable = accelerator.pin(self._address + at, min(_PINNED_BYTES, self._size - at))
            if self._is_pinnable:
                self._pinned.append(self._address + at)

    def fit(self, size_bytes: int) -> None:
        """Set the file's size. Raises OSError, also if memory is short."""
        if size_bytes == self._size:
            return
        self.unmap()
        with opened(self._path) as fd:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)  # too little memory is an error here; it would be a SIGBUS later
            self._map_all(fd, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._map.madvise(mmap.MADV_DONTFORK)  # or a DataLoader's worker would hold the memory
