"""Snapshots of this run: asked for when it is time, kept in shared memory that no rank's death takes away.

Two can be kept: the newest complete one, and the one that is being taken. What a snapshot holds goes on to the disk in
the background; the next one is asked for only when its place is free again, so that nothing piles up.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from ttprun import recovery
from ttprun.agent.base import stored_states
from ttprun.agent.lead.checkpoints import Checkpoints, SnapshotBuffer
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.lead import Lead, Row
from ttprun.agent.lead.schedules import SnapshotTimes
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.snapshot_messages import SnapshotTaken
from ttprun.tensors.shares import version_of

logger = logging.getLogger("ttprun")

_ROOM_AHEAD_S = 60.0


@dataclass
class Snapshots:
    """The snapshots of a node's ranks.

    buffers      memory for them
    newest       the newest complete one
    share_bytes  about how large a rank's share will be; 0 before the first step
    """

    _node: Lead
    _times: SnapshotTimes
    _comparisons: Comparisons
    _checkpoints: Checkpoints
    buffers: list[SnapshotBuffer]
    newest: SnapshotBuffer | None = None
    share_bytes: int = 0
    _has_room: bool = False
    _taking: threading.Thread | None = None
    _number: int = 0  # of the one that was asked for last
    _is_pending: bool = False
    _reason: str = ""  # why there was none the last time

    def close(self) -> None:
        """The ranks are gone: give the memory back."""
        buffers, self.buffers = self.buffers, []
        for buffer in buffers:
            if not buffer.is_read:  # else its descriptors' numbers would be others' before it is on the disk
                buffer.close()

    def look(self) -> None:
        """Ask for the next one, if it is time and there is room."""
        job = self._node.job
        if self._times.is_off or job.phase is not recovery.JobPhase.RUNNING or job.unprotected_reason or job.are_alone:
            self._is_pending = False  # a rank that has been replaced does not take it
            return
        if self.share_bytes and not self._has_room and self._times.is_due(_ROOM_AHEAD_S):
            self._has_room = True
            fresh = [fd for buffer in self.buffers if not buffer.is_asked for fd in buffer.shares]
            self._taking = stored_states.take_ahead(fresh, self.share_bytes)
        is_taking = self._taking is not None and self._taking.is_alive()  # it would make a share longer than it is
        if self._is_pending or is_taking or not self._times.is_due():
            return
        number = self._next_number()
        if self.buffers[number % len(self.buffers)].is_read:
            return
        self._number, self._is_pending = number, True
        self.buffers[number % len(self.buffers)].reports = {}
        self.buffers[number % len(self.buffers)].is_asked = True
        self._node.board.set(LEADER, Field.SNAPSHOT_ASKED, number)

    def _next_number(self) -> int:
        """Its place is not that of the newest complete one."""
        number = self._number + 1
        return number + 1 if self.newest is self.buffers[number % len(self.buffers)] else number

    def take(self, slot: Row, message: SnapshotTaken) -> None:
        """A rank has written its part of a snapshot, or could not."""
        if message.number != self._number or not self._is_pending:
            return
        if message.share is None:
            self._is_pending = False
            self._times.note_taken()
            self._report_failure(message.boundary, message.why_not, "no snapshot was taken")
            return
        buffer = self.buffers[self._number % len(self.buffers)]
        buffer.reports[slot.local_rank] = message
        if len(buffer.reports) < len(self._node.slots):
            return
        self._is_pending = False
        self._times.note_taken()
        buffer.boundary = message.boundary
        buffer.replicas = self._node.job.replicas
        if self._lacks_something(buffer):
            self._times.is_wanted = True
            return
        why_not = self._comparisons.why_not_alike(buffer.replicas, buffer.written)
        if why_not:
            self._comparisons.look_soon(buffer.boundary)
            self._report_failure(buffer.boundary, why_not, "no snapshot was taken")
            return
        why_not = self._why_not_complete(buffer)
        if why_not:
            self._times.is_off = True
            self._report_failure(buffer.boundary, why_not, "no snapshots are taken from now on")
            return
        self._times.is_wanted = False
        self._times.cost_s = took_s = max(report.took_s for report in buffer.reports.values())
        self._node.advance(recovery.SnapshotTaken(at_s=time.monotonic(), boundary=buffer.boundary))
        if self._node.job.snapshot != buffer.boundary:
            return  # no replay could reach it: the job goes back to the one before, which stays
        is_first, self.newest, self._reason = self.newest is None, buffer, ""
        if is_first:
            self._comparisons.note_snapshot()
        self._node.log(
            "snapshot_taken", boundary=buffer.boundary, bytes=buffer.size_bytes, took_s=took_s, number=self._number
        )
        if self._times.is_due_on_disk() and not self._checkpoints.is_busy:
            self._times.note_written()
            buffer.is_read = True
            self._checkpoints.write_snapshot(buffer, lambda: self._written(buffer))

    def _written(self, buffer: SnapshotBuffer) -> None:
        """A snapshot is on the disk, or could not be written: its place is free."""
        buffer.is_read = False
        if not any(buffer is kept for kept in self.buffers):
            buffer.close()

    def _lacks_something(self, buffer: SnapshotBuffer) -> bool:
        """Whether a rank has left out what it alone holds, because it did not know: the next one will have it."""
        replicas = self._node.job.replicas
        if {share.differing for share in buffer.written.values()} != {version_of(replicas.differing)}:
            for slot in self._node.slots:
                self._comparisons.report_owners(slot)
            return True
        return False

    def _why_not_complete(self, buffer: SnapshotBuffer) -> str:
        """Why what the ranks have written does not belong together; "" if it does."""
        if len({report.boundary for report in buffer.reports.values()}) > 1:
            return "the ranks have taken it at different steps"
        if len({share.header_xxh3 for share in buffer.written.values()}) > 1:
            return "the ranks hold different parameters, of which there is no replica"
        return ""

    def _report_failure(self, boundary: int, why_not: str, what: str) -> None:
        self._node.log("snapshot_failed", boundary=boundary, reason=why_not, is_off=self._times.is_off)
        if why_not != self._reason:
            self._reason = why_not
            logger.warning("%s: %s", what, why_not)
