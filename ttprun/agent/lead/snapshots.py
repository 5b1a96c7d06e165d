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

from ttprun import recovery
from ttprun.agent.base import stored_states
from ttprun.agent.lead.checkpoints import Checkpoints, SnapshotBuffer
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.rows import Lead, Row
from ttprun.agent.lead.schedules import SnapshotTimes
from ttprun.errors import counted
from ttprun.protocol import to_rank
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.node_messages import TakeAgain
from ttprun.protocol.snapshot_messages import SnapshotTaken
from ttprun.tensors.shares import version_of

logger = logging.getLogger("ttprun")

_ROOM_AHEAD_S = 60.0
NO_STANDBY = "no standby is ready"
# Two processes that begin without something that is in no record agree with each other, in each step.
NOT_PROVED = "no step was equal before, so what it depends on may be in no record"


@dataclass
class _Verified:
    """A step that is verified: that of one rank, after a snapshot, or after what it alone keeps on several nodes.

    since_s  when its beginning was kept; then when the rank had taken it
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
    note_suspect  called with a suspect rank of this node; returns what was done with its device, for people
    newest       the newest complete one
    share_bytes  about how large a rank's share will be; 0 before the first step
    """

    _node: Lead
    _times: SnapshotTimes
    _comparisons: Comparisons
    _checkpoints: Checkpoints
    buffers: list[SnapshotBuffer]
    note_suspect: Callable[[int], str] = lambda rank: ""
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
    _suspected: set[int] = field(default_factory=set)  # nodes
    _taken_s: float = field(default_factory=time.monotonic)  # when the newest was complete
    _not_verified: set[str] = field(default_factory=set)  # reasons that were said
    _why_none: str = "the script has taken too few"  # of all steps was verified; "": one was

    @property
    def _are_of_all(self) -> bool:
        """All ranks take them together; else each keeps alone what its verified step begins with."""
        return "rewind" in self._node.config.rungs

    def close(self) -> None:
        """The ranks are gone: give the memory back."""
        buffers, self.buffers = self.buffers, []
        for buffer in buffers:
            if not buffer.is_read:  # else its descriptors' numbers would be others' before it is on the disk
                buffer.close()

    def conclude(self) -> None:
        """The job has ended."""
        if self._node.config.verified_every and self._why_none and not self._node.peers.is_follower:
            logger.warning("no step was verified: %s", self._why_none)

    def look(self) -> None:
        """Ask for the next one, if it is time and there is room."""
        job = self._node.job
        if job.phase is not recovery.JobPhase.RUNNING or job.unprotected_reason or job.are_alone:
            self._is_pending = False  # a rank that has been replaced does not take it
            self._end_verification()
            return
        if self._verified is not None and self._verified.generation != job.generation:
            self._end_verification()  # the rank may have been replaced in that step
        if self._verified is not None and (too_late := self._why_too_late(self._verified)):
            self._note_not_verified(too_late)
        if self._times.is_off:
            self._is_pending = False
            return
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

    def _begin_verification(self, rank: int, boundary: int, took_s: float) -> None:
        """What the rank's next step begins with is kept, which has taken it so long."""
        now, every_s = time.monotonic(), time.monotonic() - self._taken_s
        self._verified = _Verified(rank, boundary, self._node.job.generation, now, every_s, took_s)
        self._taken_s = now

    def _why_too_late(self, verified: _Verified) -> str:
        """On several nodes nobody could go back behind the step, so its rank must wait longer than is waited for it."""
        config = self._node.config
        limit_s = config.replay_timeout_s if self._are_of_all or not verified.taken else config.commit_timeout_s
        is_over = time.monotonic() - verified.since_s > limit_s
        return f"it takes longer than {limit_s:.0f} s" if is_over else ""

    def _verify(self, slot: Row, message: SnapshotTaken) -> None:
        """The rank whose step is verified has taken it, or another process has: have one take it until two agree."""
        verified, self._early = self._verified, (slot, message)
        named = (slot.rank, message.boundary, message.number)
        if verified is None or named != (verified.rank, verified.boundary, len(verified.taken)):
            return
        if why_not := message.why_not or self._why_too_late(verified):
            self._note_not_verified(why_not)
            return
        verified.taken.append(message)
        if len(verified.taken) == 1:
            verified.since_s = time.monotonic()
            verified.cost_s += message.took_s
        else:
            rows = [taken.rows or () for taken in verified.taken]
            judged = recovery.StepDiffers.judge(rows, verified.taken[0].layouts)
            if judged.finding != "again":
                self._conclude(verified, *judged)
                return
        self._order(verified, len(verified.taken))

    def _order(self, verified: _Verified, number: int) -> None:
        self._node.order(verified.rank, TakeAgain(verified.rank, verified.boundary, number))

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
            if moved := self.note_suspect(rank) if self._are_of_all else self._note_node(rank):
                reason = f"{reason}; {moved}"
            applied = self._node.board.get(rank, Field.APPLIED)
            differs = recovery.StepDiffers(
                at_s=now,
                rank=rank,
                pid=self._node.slots[rank].pid,
                boundary=applied if self._are_of_all else step,
                reason=reason,
                is_before=not self._are_of_all,
            )
            self._node.advance(differs)
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

    def _why_no_way_back(self, rank: int) -> str:
        """On several nodes: why the others could not save what all go back to, if this rank were suspect."""
        has_writer = self._node.peers.ranks_per_node > 1  # on its node, for what it alone holds
        return self._checkpoints.why_never or str(recovery.why_not_replaceable(self._node.job, (rank,), has_writer))

    def _note_node(self, rank: int) -> str:
        """A rank is suspect, on several nodes: what to do if one of its node was before."""
        peers, number = self._node.peers, self._node.peers.node_of(rank)
        was_before = number in self._suspected
        self._suspected.add(number)
        how = "at its next start" if number == peers.leader else f"ttprun drain {number}"
        what = f"a rank of {peers.name_of(number)} was suspect before: take it out of the job ({how})"
        return what if was_before else ""

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
        if self._verified is not None:
            self._order(self._verified, 0)
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
        if not self._are_of_all:
            if self._verified is not None:
                self._note_not_verified("it takes longer than up to the next one")
            self._begin_verification(slot.rank, message.boundary, message.took_s)
            why_not = message.why_not if message.share is None else self._why_no_way_back(slot.rank)
            if why_not:
                self._note_not_verified(why_not)
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
        if self._node.config.verified_every:
            verified = self._node.slots[self._number % len(self._node.slots)]
            verified.stored = buffer.as_stored()
            self._begin_verification(verified.rank, buffer.boundary, took_s)
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
