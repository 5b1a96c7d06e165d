"""Snapshots of this run: asked for when it is time, kept in shared memory that no rank's death takes away.

Two can be kept: the newest complete one, and the one that is being taken. What a snapshot holds goes on to the disk in
the background; the next one is asked for only when its place is free again, so that nothing piles up.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.agent import memory
from ttprun.agent.stored import Stored, unpack
from ttprun.protocol.board import LEADER, Field
from ttprun.rank.weights.checkpoint_shards import version_of
from ttprun.recovery.replicas import UNKNOWN, Replicas
from ttprun.state.interval import best_interval_s, parse_interval

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor
    from ttprun.protocol.from_rank import Share, SnapshotTaken

logger = logging.getLogger("ttprun")

_SHELVES = 2
_ROOM_AHEAD_S = 60.0
_OFTEN_S = 2.0  # at least, between two that are the only source of a lost rank's state
_OFTEN_SHARE = 0.01  # of the training's time, which they may take


@dataclass
class Shelf:
    """Memory for one snapshot: two memfds for each rank.

    records, shares   by local rank: its own part, and its share of what replicas hold
    told              what the ranks have said of it
    replicas          which ranks held the same when it was taken
    is_asked          ranks have been told to write here, and may do so at any moment
    is_read           it is being written to disk
    """

    records: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    boundary: int = 0
    told: dict[int, SnapshotTaken] = field(default_factory=dict)
    replicas: Replicas = UNKNOWN
    is_asked: bool = False
    is_read: bool = False

    @property
    def written(self) -> dict[int, Share]:
        """The ranks' shares, by local rank."""
        return {rank: told.share for rank, told in self.told.items() if told.share is not None}

    @property
    def first(self) -> Share:
        """The first share, which has what only one rank writes."""
        return next(share for share in self.written.values() if share.share == 0)

    @property
    def size_bytes(self) -> int:
        """Of the whole snapshot."""
        return sum(told.records_bytes + self.written[rank].bytes for rank, told in self.told.items())

    @property
    def headers(self) -> dict[int, list[Any]]:
        """By rank, what they hold; empty if all hold the same."""
        return {rank: share.header for rank, share in self.written.items()} if self.replicas.parted else {}

    def as_stored(self) -> Stored:
        """What ranks can go back to. They read it through this process, which holds the descriptors."""
        files = tuple(path_of(fd) for fd in self.shares)
        return Stored(
            self.boundary,
            "shared memory",
            (),
            self.first.header,
            files,
            self._rank_part,
            headers=self.headers,
            replicas=self.replicas,
        )

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
        self._written_s = -math.inf
        self._cost_s = 0.0
        self._is_wanted = False  # at once, whatever the interval is
        self._told = ""

    @property
    def is_never(self) -> bool:
        """The user wants none."""
        return self._interval.is_never

    @property
    def is_off(self) -> bool:
        """None is taken, or none any more."""
        return self._is_off

    def take_one_at_once(self) -> None:
        """Some rank holds what no other one does: with `auto` the first snapshot is not put off."""
        if self._interval.is_auto:
            self._is_wanted = True

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
        self._is_wanted = False
        self.share_bytes, self._has_room = 0, False
        self.shelves = [
            Shelf([_new_memory() for _ in range(world_size)], [_new_memory() for _ in range(world_size)])
            for _ in range(_SHELVES)
        ]

    def paths_for(self, local_rank: int) -> list[tuple[str, str]]:
        """Where a rank puts its records and its share, for each shelf."""
        return [(path_of(shelf.records[local_rank]), path_of(shelf.shares[local_rank])) for shelf in self.shelves]

    def look(self) -> None:
        """Ask for the next one, if it is time and there is room."""
        job = self._supervisor.job
        if self._is_off or job.phase is not recovery.Phase.RUNNING or job.unprotected_reason or job.are_alone:
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
        if self._is_wanted:
            return True
        if self._interval.steps is not None:
            return True  # the ranks themselves count the steps
        now = time.monotonic()
        wanted_s = self._wanted_s(now)
        if self._is_only_source:
            wanted_s = min(wanted_s, max(_OFTEN_S, self._cost_s / _OFTEN_SHARE))
        return now - self._last_s >= wanted_s - ahead_s

    def _wanted_s(self, now: float) -> float:
        """Seconds between two that are written to disk."""
        if self._interval.seconds is not None:
            return self._interval.seconds
        return best_interval_s(self._cost_s, now - self._began_s, self._supervisor.job.incident_count)

    @property
    def _is_only_source(self) -> bool:
        """With `auto`, where a lost rank can only come from a snapshot: then they are taken often."""
        job = self._supervisor.job
        seats = self._supervisor.seats
        has_no_peer = bool(job.replicas.has_single_holders or job.unreplicated_reason)
        if len(seats) == 1:  # what it keeps of itself is newer, if it keeps anything
            has_no_peer = not self._supervisor.board.get(LEADER, Field.OWN_STATE)
        return self._interval.is_auto and has_no_peer

    def _next_number(self) -> int:
        """Its place is not that of the newest complete one."""
        number = self._number + 1
        return number + 1 if self.newest is self.shelves[number % _SHELVES] else number

    def take(self, seat: Seat, message: SnapshotTaken) -> None:
        """A rank has written its part of a snapshot, or could not."""
        if message.number != self._number or not self._is_pending:
            return
        if message.share is None:
            self._is_pending, self._last_s = False, time.monotonic()
            self._tell(message.boundary, message.why_not, "no snapshot was taken")
            return
        shelf = self.shelves[self._number % _SHELVES]
        shelf.told[seat.local_rank] = message
        if len(shelf.told) < len(self._supervisor.seats):
            return
        self._is_pending = False
        self._last_s = time.monotonic()
        shelf.boundary = message.boundary
        shelf.replicas = self._supervisor.job.replicas
        if self._lacks_something(shelf):
            self._is_wanted = True
            return
        why_not = self._why_not_alike(shelf)
        if why_not:
            self._tell(shelf.boundary, why_not, "no snapshot was taken")
            return
        why_not = self._why_not_complete(shelf)
        if why_not:
            self._is_off = True
            self._tell(shelf.boundary, why_not, "no snapshots are taken from now on")
            return
        self._is_wanted = False
        self._cost_s = max(told.took_s for told in shelf.told.values())
        self.newest, self._told = shelf, ""
        self._supervisor.log(
            "snapshot_taken", boundary=shelf.boundary, bytes=shelf.size_bytes, took_s=self._cost_s, number=self._number
        )
        self._supervisor.advance(recovery.SnapshotTaken(at_s=time.monotonic(), boundary=shelf.boundary))
        is_due_on_disk = not self._is_only_source or self._last_s - self._written_s >= self._wanted_s(self._last_s)
        if is_due_on_disk and not self._supervisor.checkpoints.is_busy:
            self._written_s = self._last_s
            shelf.is_read = True
            self._supervisor.checkpoints.write_snapshot(shelf, lambda: self._written(shelf))

    def _written(self, shelf: Shelf) -> None:
        """A snapshot is on the disk, or could not be written: its place is free."""
        shelf.is_read = False
        if not any(shelf is one for one in self.shelves):
            shelf.close()

    def _lacks_something(self, shelf: Shelf) -> bool:
        """Whether a rank has left out what it alone holds, because it did not know: the next one will have it."""
        replicas = self._supervisor.job.replicas
        if {share.apart for share in shelf.written.values()} != {version_of(replicas.parted)}:
            for seat in self._supervisor.seats:
                self._supervisor.comparisons.tell_owners(seat)
            return True
        return False

    def _why_not_alike(self, shelf: Shelf) -> str:
        """Why what replicas have shared out among them is not one state: it is looked at in full, which tells more."""
        digests = {rank: share.digests for rank, share in shelf.written.items()}
        keys, comparisons = shelf.replicas.contradicted_by(digests), self._supervisor.comparisons
        if not keys:
            return ""
        comparisons.look_soon(shelf.boundary)
        return f"ranks that were replicas of each other hold different values of {comparisons.names_of(keys)}"

    def _why_not_complete(self, shelf: Shelf) -> str:
        """Why what the ranks have written does not belong together; "" if it does."""
        if len({told.boundary for told in shelf.told.values()}) > 1:
            return "the ranks have taken it at different steps"
        if len({share.header_xxh3 for share in shelf.written.values()}) > 1:
            return "the ranks hold different parameters, of which there is no replica"
        return ""

    def _tell(self, boundary: int, why_not: str, what: str) -> None:
        self._supervisor.log("snapshot_failed", boundary=boundary, reason=why_not, is_off=self._is_off)
        if why_not != self._told:
            self._told = why_not
            logger.warning("%s: %s", what, why_not)


def _new_memory() -> int:
    return os.memfd_create("ttprun-snapshot", os.MFD_CLOEXEC)
