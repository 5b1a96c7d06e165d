"""Snapshots of this run: asked for when it is time, kept in shared memory that no rank's death takes away.

Two can be kept: the newest complete one, and the one that is being taken. What a snapshot holds goes on to the disk in
the background; the next one is asked for only when its place is free again, so that nothing piles up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.agent import memory
from ttprun.agent.stored import Stored, unpack
from ttprun.board import LEADER, Field
from ttprun.state.interval import best_interval_s, parse_interval

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor
    from ttprun.channel import Message

logger = logging.getLogger("ttprun")

_SHELVES = 2
_ROOM_AHEAD_S = 60.0


@dataclass
class Shelf:
    """Memory for one snapshot: two memfds for each rank.

    records, shares   by local rank: its own part, and its share of what replicas hold
    told              what the ranks have said of it
    is_asked          ranks have been told to write here, and may do so at any moment
    is_read           it is being written to disk
    """

    records: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    boundary: int = 0
    told: dict[int, Message] = field(default_factory=dict)
    is_asked: bool = False
    is_read: bool = False

    @property
    def first(self) -> Message:
        """What the rank with the first share has told."""
        return next(told for told in self.told.values() if told["share"] == 0)

    @property
    def size_bytes(self) -> int:
        """Of the whole snapshot."""
        return sum(told["bytes"] + told["records_bytes"] for told in self.told.values())

    def as_stored(self) -> Stored:
        """What ranks can go back to. They read it through this process, which holds the descriptors."""
        files = tuple(path_of(fd) for fd in self.shares)
        return Stored(self.boundary, "shared memory", (), self.first["header"], files, self._rank_part)

    def _rank_part(self, rank: int) -> dict[str, Any]:
        fd = self.records[rank]
        return unpack(os.pread(fd, os.fstat(fd).st_size, 0))

    def close(self) -> None:
        """Give the memory back."""
        for fd in (*self.records, *self.shares):
            os.close(fd)


def path_of(fd: int) -> str:
    """Under which path other processes of this user can open a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"


class Snapshots:
    """The snapshots of the ranks that a supervisor looks after.

    newest       the newest complete one
    share_bytes  about how large a rank's share will be; 0 before the first step
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        config = supervisor.config
        self._interval = parse_interval(config.snapshot_every)
        self._is_off = self._interval.is_never
        self.shelves: list[Shelf] = []
        self.newest: Shelf | None = None
        self.share_bytes = 0
        self._has_room = False
        self._taking: threading.Thread | None = None
        self._number = 0  # of the one that was asked for last
        self._is_pending = False
        self._began_s = self._last_s = time.monotonic()
        self._cost_s = 0.0
        self._told = ""

    @property
    def every_steps(self) -> int:
        """Optimizer steps between two; 0 if they come by time."""
        return self._interval.steps or 0

    def begin_group(self, world_size: int) -> None:
        """All ranks are new, and none of the old snapshots is theirs."""
        for shelf in self.shelves:
            if not shelf.is_read:  # else its descriptors' numbers would be others' before it is on the disk
                shelf.close()
        self.newest, self._is_pending, self._last_s = None, False, time.monotonic()
        self.share_bytes, self._has_room = 0, False
        self.shelves = [
            Shelf([_new_memory() for _ in range(world_size)], [_new_memory() for _ in range(world_size)])
            for _ in range(_SHELVES)
        ]

    def paths_for(self, local_rank: int) -> list[list[str]]:
        """Where a rank puts its records and its share, for each shelf."""
        return [[path_of(shelf.records[local_rank]), path_of(shelf.shares[local_rank])] for shelf in self.shelves]

    def look(self) -> None:
        """Ask for the next one, if it is time and there is room."""
        job = self._supervisor.job
        if self._is_off or job.phase is not recovery.Phase.RUNNING or job.unprotected_reason:
            self._is_pending = False  # a rank that has been replaced does not take it
            return
        if self.share_bytes and not self._has_room and self._is_due(_ROOM_AHEAD_S):
            self._has_room = True
            fresh = [fd for shelf in self.shelves if not shelf.is_asked for fd in shelf.shares]
            self._taking = memory.take_ahead(fresh, self.share_bytes)
        is_taking = self._taking is not None and self._taking.is_alive()  # it would make a share longer than it is
        if self._is_pending or is_taking or not self._is_due():
            return
        number = self._next_number()
        if self.shelves[number % _SHELVES].is_read:
            return
        self._number, self._is_pending = number, True
        self.shelves[number % _SHELVES].told = {}
        self.shelves[number % _SHELVES].is_asked = True
        self._supervisor.board.set(LEADER, Field.SNAPSHOT_ASKED, number)

    def _is_due(self, ahead_s: float = 0.0) -> bool:
        if self._interval.steps is not None:
            return True  # the ranks themselves count the steps
        now = time.monotonic()
        wanted_s = self._interval.seconds
        if wanted_s is None:
            wanted_s = best_interval_s(self._cost_s, now - self._began_s, self._supervisor.job.incident_count)
        return now - self._last_s >= wanted_s - ahead_s

    def _next_number(self) -> int:
        """Its place is not that of the newest complete one."""
        number = self._number + 1
        return number + 1 if self.newest is self.shelves[number % _SHELVES] else number

    def take(self, seat: Seat, message: Message) -> None:
        """A rank has written its part of a snapshot, or could not."""
        if message["number"] != self._number or not self._is_pending:
            return
        if message["why_not"]:
            self._is_pending, self._last_s = False, time.monotonic()
            self._tell(message["boundary"], message["why_not"], "no snapshot was taken")
            return
        shelf = self.shelves[self._number % _SHELVES]
        shelf.told[seat.local_rank] = message
        if len(shelf.told) < len(self._supervisor.seats):
            return
        self._is_pending = False
        self._last_s = time.monotonic()
        shelf.boundary = message["boundary"]
        why_not = self._why_not_complete(shelf)
        if why_not:
            self._is_off = True
            self._tell(shelf.boundary, why_not, "no snapshots are taken from now on")
            return
        self._cost_s = max(told["took_s"] for told in shelf.told.values())
        self.newest, self._told = shelf, ""
        self._supervisor.log(
            "snapshot_taken", boundary=shelf.boundary, bytes=shelf.size_bytes, took_s=self._cost_s, number=self._number
        )
        self._supervisor.advance(recovery.SnapshotTaken(at_s=time.monotonic(), boundary=shelf.boundary))
        if not self._supervisor.checkpoints.is_busy:
            shelf.is_read = True
            self._supervisor.checkpoints.write_snapshot(shelf, lambda: self._written(shelf))

    def _written(self, shelf: Shelf) -> None:
        """A snapshot is on the disk, or could not be written: its place is free."""
        shelf.is_read = False
        if not any(shelf is one for one in self.shelves):
            shelf.close()

    def _why_not_complete(self, shelf: Shelf) -> str:
        """Ranks that do not replicate each other have left out what only they hold."""
        if len({told["boundary"] for told in shelf.told.values()}) > 1:
            return "the ranks have taken it at different steps"
        if len({told["header_xxh3"] for told in shelf.told.values()}) > 1:
            return "the ranks hold different parameters, of which there is no replica"
        if len({told["weights"] for told in shelf.told.values()}) > 1:
            return "the ranks hold different weights, of which there is no replica"
        return ""

    def _tell(self, boundary: int, why_not: str, what: str) -> None:
        self._supervisor.log("snapshot_failed", boundary=boundary, reason=why_not, is_off=self._is_off)
        if why_not != self._told:
            self._told = why_not
            logger.warning("%s: %s", what, why_not)


def _new_memory() -> int:
    return os.memfd_create("ttprun-snapshot", os.MFD_CLOEXEC)
