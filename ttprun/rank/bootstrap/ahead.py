"""A set-up that runs while its rank still lives: it must not touch what the rank writes in shared memory.

Until the process replaces its rank it has a board, a recorder and a stack file of its own, with what the rank's hold at
the beginning. Then the rank's own are mapped over them, at the same addresses. Begin with `Ahead`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ttprun.capture.records.boundary_record import Record
from ttprun.capture.records.recorder import Recorder
from ttprun.protocol import to_rank
from ttprun.protocol.board import Board, Field

_MAPS, _TASKS = Path("/proc/self/maps"), Path("/proc/self/task")
_OF_PROCESS = (Field.PHASE, Field.SEEN_NS, Field.OPERATION, Field.MEETINGS, Field.PULSE_NS)
_MAP_FIXED = 0x10
_ATTEMPTS = 100  # to read a record that the rank overwrites now and then


class Ahead:
    """The shared memory of a process that runs the set-up of a rank that lives.

    fds      of its own board, recorder and stack file
    sample   a record of the rank: which loops it trains in
    """

    def __init__(self, welcome: to_rank.Welcome, fds: list[int]) -> None:
        self._welcome = welcome
        self._theirs = fds
        slot_bytes = welcome.options.record_limit_mib << 20
        board, _ = Board.create(welcome.world_size)
        os.pwrite(board, os.pread(fds[0], Board.size_bytes(welcome.world_size), 0), 0)
        self.fds = [board, Recorder.create(slot_bytes), os.memfd_create("ttprun-stack", os.MFD_CLOEXEC)]
        theirs = Recorder(fds[1], slot_bytes)
        self.sample = _newest_of(theirs)
        own = Recorder(self.fds[1], slot_bytes)
        for entry in theirs.read_log():
            own.append_log(entry)

    def end(self) -> None:
        """The process replaces its rank: what it has mapped is the rank's from now on."""
        own = Board(self.fds[0], self._welcome.world_size)
        rank = self._welcome.rank
        left = {field: own.get(rank, field) for field in _OF_PROCESS}
        beats = own.get(rank, Field.MAIN_BEATS)
        for mine, theirs in zip(self.fds, self._theirs, strict=True):
            _map_over(mine, theirs)
            os.dup2(theirs, mine, inheritable=False)
            os.close(theirs)
        for field, value in left.items():
            own.set(rank, field, value)
        own.set(rank, Field.MAIN_BEATS, beats + 1)  # one may have come meanwhile: see heartbeat.py


def has_children() -> bool:
    """Whether this process has any: they have the wrong memory mapped, and could not be given the other one."""
    return any((task / "children").read_text() for task in _TASKS.iterdir())


def _newest_of(recorder: Recorder) -> Record:
    """A whole record. Raises LookupError if there is none."""
    for _ in range(_ATTEMPTS):
        number = recorder.newest
        found = recorder.read(number)
        if found is not None and recorder.read(number) == found:
            return Record.of(*found)
    raise LookupError("the rank has left no record")


def _map_over(mine: int, theirs: int) -> None:
    """Map `theirs` wherever `mine` is mapped. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    for start, end, offset in list(_mappings_of(mine)):
        how = mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, how, theirs, offset) != start:
            raise OSError(ctypes.get_errno(), "mmap")


def _mappings_of(fd: int) -> Iterator[tuple[int, int, int]]:
    """(first address, end, offset in the file) of each."""
    inode = os.fstat(fd).st_ino
    for line in _MAPS.read_text().splitlines():
        addresses, _, offset, _, number, *path = line.split(maxsplit=5)
        if int(number) == inode and path and path[0].startswith("/memfd:ttprun-"):
            start, end = (int(one, 16) for one in addresses.split("-"))
            yield start, end, int(offset, 16)
