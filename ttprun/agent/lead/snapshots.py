"""Snapshots of this run: asked for when it is time, kept in shared memory that no rank's death takes away.

Two can be kept: the newest complete one, and the one that is being taken. What a snapshot holds goes on to the disk in
the background; the next one is asked for only when its place is free again, so that nothing piles up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ttprun import recovery
from ttprun.agent.base import stored_states
from ttprun.agent.lead.checkpoints import Checkpoints, SnapshotBuffer
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.lead import Lead, Row
from ttprun.agent.lead.schedules import SnapshotTimes
from ttprun.errors import counted
from ttprun.protocol import to_rank
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.snapshot_messages import SnapshotTaken
from ttprun.tensors.shares import version_of

logger = logging.getLogger("ttprun")

_ROOM_AHEAD_S = 60.0
NO_STANDBY = "no standby is ready"
# Two processes that begin without something that is in no record agree with each other, in each step.
NOT_PROVED = "no step was equal before, so what it depends on may be in no record"


class TakesAgain(Protocol):
    """Has a step taken again; see `Again` in agent/node/process_watch.py."""

    def note_suspect(self, rank: int) -> str: ...

    def begin(
        self, rank: int, stored: stored_states.Stored, number: int, done: Callable[[SnapshotTaken], None]
    ) -> str: ...

    def end(self) -> None: ...


@dataclass
class _Verified:
    """A step that is verified: that of one rank, after a snapshot.

    taken    what the rank has made of it, and then what other processes have
    every_s  from the snapshot before
    cost_s   time that the rank has spent on it
    """

    rank: int
    boundary: int
    generation: int
    since_s: float
    every_s: float
    cost_s: float
    taken: list[SnapshotTaken] = field(default_factory=list)


@dataclass
class Snapshots:
    """The snapshots of a node's ranks.

    buffers      memory for them
    again        has steps taken again that are verified; None: no step is verified
    newest       the newest complete one
    share_bytes  about how large a rank's share will be; 0 before the first step
    """

    _node: Lead
    _times: SnapshotTimes
    _comparisons: Comparisons
    _checkpoints: Checkpoints
    buffers: list[SnapshotBuffer]
    again: TakesAgain | None = None
    newest: SnapshotBuffer | None = None
    share_bytes: int = 0
    _has_room: bool = False
    _taking: threading.Thread | None = None
    _number: int = 0  # of the one that was asked for last
    _is_pending: bool = False
    _reason: str = ""  # why there was none the last time
    _verified: _Verified | None = None  # the step that is being verified; no snapshot is taken meanwhile
    _early: tuple[Row, SnapshotTaken] | None = None  # the newest
    _has_said: bool = False
    _is_proved: bool = False  # a step was equal, so others can be, too; not since a rank was suspect
    _taken_s: float = field(default_factory=time.monotonic)  # when the newest was complete
    _not_verified: set[str] = field(default_factory=set)  # reasons that were said
    _why_none: str = "the script has taken too few"  # of all steps was verified; "": one was

    def close(self) -> None:
        """The ranks are gone: give the memory back."""
        buffers, self.buffers = self.buffers, []
        for buffer in buffers:
            if not buffer.is_read:  # else its descriptors' numbers would be others' before it is on the disk
                buffer.close()

    def conclude(self) -> None:
        """The job has ended."""
        if self._node.config.verified_every and self._why_none:
            logger.warning("no step was verified: %s", self._why_none)

    def look(self) -> None:
        """Ask for the next one, if it is time and there is room."""
        job = self._node.job
        if self._times.is_off or job.phase is not recovery.JobPhase.RUNNING or job.unprotected_reason or job.are_alone:
            self._is_pending = False  # a rank that has been replaced does not take it
            self._end_verification()
            return
        if self._verified is not None and self._verified.generation != job.generation:
            self._end_verification()  # the rank may have been replaced in that step
        limit_s = self._node.config.replay_timeout_s
        if self._verified is not None and time.monotonic() - self._verified.since_s > limit_s:
            self._note_not_verified(f"it takes longer than {limit_s:.0f} s")
        if self.share_bytes and not self._has_room and self._times.is_due(_ROOM_AHEAD_S):
            self._has_room = True
            fresh = [fd for buffer in self.buffers if not buffer.is_asked for fd in buffer.shares]
            self._taking = stored_states.take_ahead(fresh, self.share_bytes)
        is_taking = self._taking is not None and self._taking.is_alive()  # it would make a share longer than it is
        if self._is_pending or is_taking or self._verified is not None or not self._times.is_due():
            return
        number = self._number + 1
        number += self.newest is self.buffers[number % len(self.buffers)]  # it stays until this one is complete
        if self.buffers[number % len(self.buffers)].is_read:
            return
        self._number, self._is_pending = number, True
        self.buffers[number % len(self.buffers)].reports = {}
        self.buffers[number % len(self.buffers)].is_asked = True
        self._node.board.set(LEADER, Field.SNAPSHOT_ASKED, number)

    def _verify(self, slot: Row, message: SnapshotTaken) -> None:
        """The rank whose step is verified has taken it: have another process take it again, from the snapshot."""
        verified, snapshot, self._early = self._verified, self.newest, (slot, message)
        if verified is None or snapshot is None or (slot.rank, message.boundary) != (verified.rank, verified.boundary):
            return
        if message.why_not:
            self._note_not_verified(message.why_not)
            return
        verified.taken.append(message)
        verified.cost_s += message.took_s
        self._take_again(verified, snapshot)

    def _take_again(self, verified: _Verified, snapshot: SnapshotBuffer) -> None:
        def done(message: SnapshotTaken) -> None:
            if self._verified is not verified:
                return
            if message.why_not:
                self._note_not_verified(message.why_not)
                return
            verified.taken.append(message)
            judged = recovery.StepDiffers.judge(
                [taken.rows or () for taken in verified.taken], verified.taken[0].layouts
            )
            if judged.finding == "again":
                self._take_again(verified, snapshot)
            else:
                self._conclude(verified, *judged)

        if self.again and (why_not := self.again.begin(verified.rank, snapshot.as_stored(), len(verified.taken), done)):
            self._note_not_verified(why_not)

    def _conclude(self, verified: _Verified, finding: str, what: str) -> None:
        """The step has been taken often enough."""
        rank, step, self._why_none = verified.rank, verified.boundary, ""
        if finding == "suspect" and not self._is_proved:
            finding, what = "inconclusive", f"{what}; {NOT_PROVED}"
        if self._node.config.verifies_before:  # it has waited, too, and the others for it
            verified.cost_s += time.monotonic() - verified.since_s
        self._is_proved = finding == "equal" or (self._is_proved and finding != "suspect")
        now, share = time.monotonic(), verified.cost_s / verified.every_s
        about = {"rank": rank, "step": step, "finding": finding, "what": what, "took_s": now - verified.since_s}
        self._node.log("step_verified", **about, cost_s=verified.cost_s, share=share)
        if finding == "suspect":
            reason = f"it has computed {what} of step {step} otherwise than two other processes from the same state"
            if self.again and (moved := self.again.note_suspect(rank)):
                reason = f"{reason}; {moved}"
            pid, applied = self._node.slots[rank].pid, self._node.board.get(rank, Field.APPLIED)
            self._node.advance(recovery.StepDiffers(at_s=now, rank=rank, pid=pid, boundary=applied, reason=reason))
        else:
            self._let_go_on(verified)
        if finding == "equal" and not self._has_said:
            self._has_said = True
            logger.warning(
                "step %d of rank %d was taken again by another process, and is equal (%s; it costs %.2f %% of the "
                "training's time); more is said only of differences",
                *(step, rank, counted(len(verified.taken[0].rows or ()), "digest"), 100 * share),
            )
        elif finding not in ("equal", "suspect"):
            logger.warning("step %d of rank %d, taken again: %s: %s", step, rank, finding, what)
        self._verified = None

    def _note_not_verified(self, why_not: str) -> None:
        verified = self._verified
        assert verified is not None
        self._node.log("step_not_verified", rank=verified.rank, step=verified.boundary, reason=why_not)
        self._why_none = self._why_none and why_not
        if why_not not in (*self._not_verified, NO_STANDBY):
            self._not_verified.add(why_not)
            logger.warning("step %d of rank %d is not verified: %s", verified.boundary, verified.rank, why_not)
        self._end_verification()

    def _end_verification(self) -> None:
        if self.again is not None and self._verified is not None:
            self.again.end()
            self._let_go_on(self._verified)
            self._verified = None

    def _let_go_on(self, verified: _Verified) -> None:
        """If the rank waits before its step, it may take it."""
        if self._node.config.verifies_before:
            self._node.slots[verified.rank].send_if_present(to_rank.AllCompared(verified.boundary, is_of_step=True))

    def take(self, slot: Row, message: SnapshotTaken) -> None:
        """A rank has written its part of a snapshot, or could not; or taken the step after it, if that is verified."""
        if message.rows is not None:
            self._verify(slot, message)
            return
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
        if self.again is not None and self._node.config.verified_every:
            rank = self._number % len(self._node.slots)
            now = time.monotonic()
            self._verified = _Verified(
                rank, buffer.boundary, self._node.job.generation, now, now - self._taken_s, took_s
            )
            self._taken_s = now
            if self._early is not None:  # the last rank's report of its part has come later
                self._verify(*self._early)
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
