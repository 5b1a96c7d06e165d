"""A buffer: memory for one snapshot, which outlives the ranks that write to it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ttprun.agent.processes import shared_memory
from ttprun.agent.repair.stored_states import Stored, unpack
from ttprun.protocol.snapshot_messages import Share, SnapshotTaken
from ttprun.recovery.replicas import UNKNOWN, Replicas


@dataclass
class SnapshotBuffer:
    """Memory for one snapshot: two memfds for each rank.

    records, shares   by local rank: its own part, and its share of what replicas hold
    reports           what the ranks have reported of it
    replicas          which ranks held the same when it was taken
    is_asked          ranks have the order to write here, and may do so at any moment
    is_read           it is being written to disk
    """

    records: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    boundary: int = 0
    reports: dict[int, SnapshotTaken] = field(default_factory=dict)
    replicas: Replicas = UNKNOWN
    is_asked: bool = False
    is_read: bool = False

    @property
    def written(self) -> dict[int, Share]:
        """The ranks' shares, by local rank."""
        return {rank: report.share for rank, report in self.reports.items() if report.share is not None}

    @property
    def first(self) -> Share:
        """The first share, which has what only one rank writes."""
        return next(share for share in self.written.values() if share.share == 0)

    @property
    def size_bytes(self) -> int:
        """Of the whole snapshot."""
        return sum(report.records_bytes + self.written[rank].bytes for rank, report in self.reports.items())

    @property
    def headers(self) -> dict[int, list[Any]]:
        """By rank, what they hold; empty if all hold the same."""
        return {rank: share.header for rank, share in self.written.items()} if self.replicas.differing else {}

    def as_stored(self) -> Stored:
        """What ranks can go back to. They read it through this process, which holds the descriptors."""
        files = tuple(shared_memory.path_of(fd) for fd in self.shares)
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
