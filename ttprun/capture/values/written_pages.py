"""Ask the kernel which memory has been written since the last call, by any code of this process.

Linux 6.7 and later record it page by page (userfaultfd's asynchronous write protection, read by the PAGEMAP_SCAN ioctl
of /proc/self/pagemap; see the kernel's Documentation/admin-guide/mm/pagemap.rst). A query takes microseconds, hashing
the memory takes milliseconds. The first write to a page costs a fault of about a microsecond, reads cost nothing. On
other kernels, and in containers that forbid userfaultfd, `watch` returns None. Shared memory is not watched: writes of
other processes and devices are not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from typing import Any

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)
_USER_MODE_ONLY = 1  # allowed without privileges
_HANDSHAKE, _REGISTER, _UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01  # ioctls of userfaultfd
_VERSION = 0xAA
_ASYNCHRONOUS, _UNPOPULATED_TOO = 1 << 15, 1 << 13  # features
_WRITE_PROTECTION = 2  # a registration's mode
_SCAN = 0xC0606610  # ioctl of pagemap
_PROTECT_WHAT_MATCHES, _MUST_BE_WATCHED = 1, 2  # flags of a scan
_IS_WRITTEN = 1 << 1  # category of a page
# Size, flags, start, end, end of the walk, address of regions, their number, most pages, categories: inverted, of all,
# of any, returned.
_SCAN_ARGUMENTS = struct.Struct("<12Q")
_MOST = 64  # ranges; beginning takes milliseconds
_MOST_BYTES = 512 << 20  # of all ranges: a query takes half a microsecond per MiB

_files: tuple[int, int] | None = None  # userfaultfd, pagemap
_is_refused = False
_watched: list[tuple[int, int]] = []  # pages
_REGIONS = 1024  # of written pages, that one scan reports and protects again
_ROUNDS = 64
_regions = (ctypes.c_uint64 * (3 * _REGIONS))()


class Watched:
    """A range of memory that is watched from now on.

    is_over   it is not watched any more, so never known to be untouched

    Raises OSError if the kernel does not watch it.
    """

    def __init__(self, at: int, size: int) -> None:
        self._begin_pages = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end_pages = (at + size) // mmap.PAGESIZE * mmap.PAGESIZE
        self.is_over = False
        if self._begin_pages >= self._end_pages or not _is_private(self._begin_pages, self._end_pages):
            raise OSError("not memory of this process alone")
        if any(begin < self._end_pages and self._begin_pages < end for begin, end in _watched):
            raise OSError("watched already: a scan for one range would hide writes from the other")
        if sum(end - begin for begin, end in _watched) + self._end_pages - self._begin_pages > _MOST_BYTES:
            raise OSError("to watch that much would take too long")
        # The pages at both ends are shared with other data: their bytes are compared.
        ends = ((at, self._begin_pages), (self._end_pages, at + size))
        self._edges: Any = [(ctypes.c_char * (end - begin)).from_address(begin) for begin, end in ends]
        self._faults, self._pagemap = _open()
        length = self._end_pages - self._begin_pages
        fcntl.ioctl(self._faults, _REGISTER, struct.pack("<4Q", self._begin_pages, length, _WRITE_PROTECTION, 0))
        _watched.append((self._begin_pages, self._end_pages))
        self._ask = _SCAN_ARGUMENTS.pack(
            *(_SCAN_ARGUMENTS.size, _PROTECT_WHAT_MATCHES | _MUST_BE_WATCHED, self._begin_pages, self._end_pages, 0),
            *(ctypes.addressof(_regions), _REGIONS, 0, 0, _IS_WRITTEN, 0, _IS_WRITTEN),
        )
        self.note()

    def note(self) -> None:
        """Begin a new comparison with the current content."""
        for _ in range(_ROUNDS):  # a thread of the script may write all the time
            if not self._has_written_pages():
                break
        self._seen_beside = [edge.raw for edge in self._edges]
        self._is_touched = False

    def is_untouched(self) -> bool:
        """Whether it was not written since `note`."""
        if not self._is_touched:
            self._is_touched = self._has_written_pages() or [edge.raw for edge in self._edges] != self._seen_beside
        return not (self._is_touched or self.is_over)

    def _has_written_pages(self) -> bool:
        """Whether a page was written; such pages are protected again."""
        if self.is_over:
            return False
        try:
            return bool(fcntl.ioctl(self._pagemap, _SCAN, bytearray(self._ask)))
        except OSError:  # it was mapped again
            self.is_over = True
            return False

    def end(self) -> None:
        """Stop watching; the memory may be freed already."""
        pages = (self._begin_pages, self._end_pages)
        if not _watched or pages not in _watched:  # as in a forked child, or when the interpreter ends
            return
        _watched.remove(pages)
        self.is_over = True
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._faults, _UNREGISTER, struct.pack("<2Q", pages[0], pages[1] - pages[0]))


def watch(at: int, size: int) -> Watched | None:
    """Watch a range of memory; None if it cannot be watched.

    at     address of its first byte
    size   in bytes
    """
    global _is_refused
    if _is_refused or len(_watched) >= _MOST:
        return None
    try:
        _open()
    except OSError:
        _is_refused = True  # nothing can
        return None
    try:
        return Watched(at, size)
    except OSError:
        return None


def forget() -> None:
    """Stop watching everything."""
    global _files, _is_refused
    for file in _files or ():
        os.close(file)
    _watched.clear()
    _files, _is_refused = None, False


def _leave_to_parent() -> None:
    """A forked child has other memory, and must not use its parent's files."""
    global _files
    _watched.clear()
    _files = None


os.register_at_fork(after_in_child=_leave_to_parent)


def _open() -> tuple[int, int]:
    """The two files. Raises OSError if this kernel or container does not support them."""
    global _files
    if _files is None:
        if _USERFAULTFD is None:
            raise OSError("not on this machine")
        libc = ctypes.CDLL(None, use_errno=True)
        faults = libc.syscall(_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if faults < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        try:
            fcntl.ioctl(faults, _HANDSHAKE, struct.pack("<3Q", _VERSION, _ASYNCHRONOUS | _UNPOPULATED_TOO, 0))
            pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(faults)
            raise
        _files = faults, pagemap
    return _files


def _is_private(begin: int, end: int) -> bool:
    """Whether all of a range is private anonymous memory."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            where, mode, _, _, inode, *_ = line.split(maxsplit=5)
            first, last = (int(word, 16) for word in where.split("-"))
            if first <= begin < last:
                if not mode.startswith("rw-p") or inode != "0":
                    return False
                begin = last
                if begin >= end:
                    return True
    return False
