"""What ranks report: passed on, noted, or made into events of the state machine. Begin with `Reports.take`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from ttprun import recovery
from ttprun.agent.checkpoints.checkpoints import Checkpoints
from ttprun.agent.checkpoints.snapshots import Snapshots
from ttprun.agent.cluster import board_rows
from ttprun.agent.cluster.actuators import Actuators
from ttprun.agent.core.failures import Failure
from ttprun.agent.core.incidents import Incidents
from ttprun.agent.core.node import Node
from ttprun.agent.core.outcomes import note_failure
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.health.hang_detector import HangDetector
from ttprun.agent.health.protection import Protection
from ttprun.agent.processes.standby_watch import StandbyWatch
from ttprun.agent.processes.standbys import Standbys
from ttprun.agent.repair.comparisons import Comparisons
from ttprun.agent.repair.own_state import OwnStates
from ttprun.agent.repair.repairs import Repairs
from ttprun.chaos.injections import Injections
from ttprun.observe.cures import with_cure
from ttprun.protocol import from_rank, meeting, mindio, node_orders, standbys
from ttprun.protocol.board import Field
from ttprun.protocol.channel import Message
from ttprun.protocol.codec import Refused
from ttprun.protocol.snapshots import Dumped, SnapshotSize, SnapshotTaken
from ttprun.recovery.journals import find_difference
from ttprun.recovery.members import MemberFlag

logger = logging.getLogger("ttprun")

# Messages for what protection does not need, see `domains.py`.
_PARTS: dict[type, str] = {
    standbys.ModulesOfTorch: "standbys",
    standbys.Imported: "standbys",
    from_rank.Compared: "incident notes",
    from_rank.NotProved: "incident notes",
    from_rank.NotRecorded: "incident notes",
    from_rank.Note: "incident notes",
    from_rank.Held: "comparisons",
    from_rank.FaultStruck: "fault injection",
    from_rank.FaultFailed: "fault injection",
    SnapshotSize: "snapshots",
    SnapshotTaken: "snapshots",
}
OF_THIS_NODE = (standbys.ModulesOfTorch, standbys.Imported, standbys.Ready, Refused)


@dataclass
class Reports:
    """Takes the messages of a node's ranks, and gives each to the part that it is for.

    _passed_on  what each rank has reported to all others in the present generation, by rank
    _to_pass_on  of that, what has just come
    _voided  (generation, boundary): what lost ranks have recorded beyond it was ordered to be void
    _nan_step  the step in which a NaN was reported last
    """

    node: Node
    actuators: Actuators
    comparisons: Comparisons
    checkpoints: Checkpoints
    incidents: Incidents
    injections: Injections
    hang_detector: HangDetector
    own_states: OwnStates
    protection: Protection
    repairs: Repairs
    snapshots: Snapshots
    standbys: Standbys
    standby_watch: StandbyWatch
    _passed_on: list[tuple[int, from_rank.Put]] = field(default_factory=list, init=False)
    _to_pass_on: list[tuple[int, from_rank.Put]] = field(default_factory=list, init=False)
    _voided: set[tuple[int, int]] = field(default_factory=set, init=False)
    _nan_step: int = field(default=-2, init=False)

    def take(self, slot: RankSlot, message: Message) -> None:
        """A message has come from the process of a slot."""
        part = _PARTS.get(type(message))
        if part is None:
            self._take(slot, message)
        else:
            self.node.domains.run(part, lambda: self._take(slot, message))

    def _take(self, slot: RankSlot, message: Message) -> None:
        node = self.node
        at_s, rank = time.monotonic(), slot.rank
        match message:
            case from_rank.Put():
                slot.report_in(message.generation)
                self._to_pass_on.append((slot.rank, message))
            case from_rank.RowChanged():
                board_rows.share(node, [slot])
            case standbys.Ready():
                pass  # a standby that was needed before it was ready
            case standbys.ModulesOfTorch(modules=modules, files=files):
                self.standbys.warm_up(modules, files)
                if node.peers.pool is not None:
                    node.peers.pool.warm_up(meeting.Warmth(modules, files))
                self.standby_watch.start()
            case standbys.Imported():
                starts = [other.handler.start for other in node.here]
                self.standbys.preloads.note(slot.local_rank, message, starts)
            case standbys.SetUpDone(why_not=why_not):
                node.log(
                    "set_up_of_no_use", rank=rank, reason=why_not
                )  # it ends, and another process replaces the rank
            case from_rank.Present():
                self._on_present(slot, message)
            case from_rank.Protected():
                slot.protect()
                node.advance(recovery.RankProtected(at_s=at_s, rank=rank))
            case from_rank.Unprotected(reason=reason):
                self.protection.note_unprotected(slot, reason)
            case from_rank.TrainsAlone() | from_rank.Joined():
                self.protection.note_membership(slot, message)
            case from_rank.OwnStateKept():
                self.own_states.note(slot, message)
            case from_rank.StateMirrored():
                self.comparisons.note_mirrored(slot, message)
            case from_rank.MirrorCopied():
                self.comparisons.note_mirror_copied(slot, message)
            case from_rank.CollectiveStep():
                self.comparisons.note_collective_steps()
            case from_rank.Hindered():
                self.protection.note_hindered(slot, message)
            case from_rank.ScriptError():
                self.note_script_error(slot, message)
            case from_rank.Faulted():
                self._on_faulted(slot, message)
            case from_rank.Broken():
                self.hang_detector.take_broken(slot, message)
            case from_rank.Frozen():
                self._on_frozen(slot, message)
            case from_rank.Replayed(generation=generation, boundary=boundary):
                node.log("rank_replayed", rank=rank, **asdict(message))
                replayed = recovery.RankReplayed(at_s=at_s, rank=rank, generation=generation, boundary=boundary)
                node.advance(replayed)
            case mindio.Prepared(generation=generation, boundary=boundary):
                self.repairs.take(slot, message)
                node.log("rank_replayed", rank=rank, generation=generation, boundary=boundary, setup_s=0.0)
                replayed = recovery.RankReplayed(at_s=at_s, rank=rank, generation=generation, boundary=boundary)
                node.advance(replayed)
            case from_rank.StateSent(generation=generation, digest=digest):
                sent = recovery.StateSent(at_s=at_s, rank=rank, generation=generation, digest=digest)
                node.advance(sent)
            case from_rank.Repaired(generation=generation, digest=digest, loaded=loaded):
                repaired = recovery.RankRepaired(
                    at_s=at_s, rank=rank, generation=generation, digest=digest, boundary=loaded or None
                )
                node.advance(repaired)
            case from_rank.Rebuilt(generation=generation):
                node.advance(recovery.RankRebuilt(at_s=at_s, rank=rank, generation=generation))
            case from_rank.Reissued(generation=generation):
                node.advance(recovery.RankReissued(at_s=at_s, rank=rank, generation=generation))
            case from_rank.Mismatch(generation=generation, reason=reason, detail=detail):
                if detail:
                    node.log("mismatch_detail", rank=rank, detail=detail)
                found = recovery.MismatchFound(
                    at_s=at_s,
                    rank=rank,
                    generation=generation,
                    reason=reason if message.is_near else with_cure(reason),
                    is_contradiction=message.is_contradiction,
                    is_near=message.is_near,
                )
                node.advance(found)
            case from_rank.Compared(equal=equal, not_proved=not_proved):
                self.incidents.note_compared(rank, equal, not_proved)
            case from_rank.Unaligned() | from_rank.Aligned():
                self.repairs.take(slot, message)
            case from_rank.Held():
                self.comparisons.take(slot, message)
            case from_rank.StoppedDivergent():
                self._on_stopped(slot)
            case from_rank.NanFound():
                self._on_nan(slot, message)
            case SnapshotSize(bytes=share_bytes):
                self.snapshots.share_bytes = share_bytes
            case SnapshotTaken():
                self.snapshots.take(slot, message)
            case Dumped():
                self.checkpoints.take_dumped(slot, message)
            case from_rank.FaultStruck():
                self.injections.struck(slot, message)
            case from_rank.FaultFailed():
                self.injections.failed(slot, message)
            case from_rank.NotProved(names=names):
                node.log("not_proved", rank=rank, names=names)
                self.incidents.not_proved.take(rank, names)
            case from_rank.NotRecorded(sentences=sentences):
                node.log("not_recorded", rank=rank, sentences=sentences)
                self.incidents.not_proved.take_unrecorded(rank, sentences)
            case from_rank.Note(text=text):
                node.log("note", rank=rank, text=text)
                logger.warning("rank %d: %s", rank, text)
            case (
                mindio.ReplicasDeclared()
                | mindio.DataParallelDeclared()
                | mindio.ElasticDeclared()
                | mindio.SchedulerRegistered()
                | mindio.SchedulerAsked()
                | mindio.Paused()
                | mindio.SavedByFramework()
                | mindio.Renamed()
            ):
                self.repairs.take(slot, message)
            case Refused(reason=reason):
                self._refuse(slot, reason)
            case _:
                self._refuse(slot, f"{type(message).__name__} is no message of a rank")

    def _refuse(self, slot: RankSlot, reason: str) -> None:
        """A rank has sent what is no message, which has no effect: what should have come instead has its deadline."""
        self.node.log("message_refused", rank=slot.rank, reason=reason)
        logger.warning("a message of rank %d is ignored: %s", slot.rank, reason)

    def _on_present(self, slot: RankSlot, message: from_rank.Present) -> None:
        """A process has greeted: it is sent what it has missed."""
        self.pass_on()
        slot.greet(message.main_thread)
        self.comparisons.report_owners(slot)
        for sender, put in self._passed_on:
            if sender != slot.rank and put.generation >= self.node.job.generation:
                slot.send_if_present(put)
        self.injections.greeted(slot)

    def note_script_error(self, slot: RankSlot, message: from_rank.ScriptError) -> None:
        """An exception ends a script; before the first step its traceback is printed here, once."""
        if message.traceback and not any(other.script_error for other in self.node.slots):
            with contextlib.suppress(OSError):  # whoever read it has gone
                os.write(2, message.traceback.encode(errors="backslashreplace"))
        slot.note_error(message)
        self.node.log("script_error", rank=slot.rank, error=message.error, traceback=message.detail)

    def begin_group(self) -> None:
        """All ranks are new."""
        self._nan_step = -2
        self._passed_on, self._to_pass_on, self._voided = [], [], set()

    def _on_stopped(self, slot: RankSlot) -> None:
        """A rank that has diverged stands behind a boundary, and has given the others nothing since."""
        recorded = self.node.board.get(slot.rank, Field.RECORDED)
        at_s, reason = time.monotonic(), slot.divergence
        diverged = recovery.RankDiverged(at_s=at_s, rank=slot.rank, pid=slot.pid, boundary=recorded, reason=reason)
        self.node.advance(diverged)
        if not slot.is_lost:  # it came while a checkpoint was written, say: the next comparison finds it again
            slot.forget_divergence()

    def _on_faulted(self, slot: RankSlot, message: from_rank.Faulted) -> None:
        """A transient error has ended the script of a rank, which waits for orders."""
        node = self.node
        slot.fault(self.own_states.reached(slot, node.board.get(slot.rank, Field.RECORDED)))
        self.comparisons.report_owners(slot)
        failure = Failure(slot.rank, slot.pid, 1, message.error, message.detail)
        note_failure(node, failure)
        event = recovery.RankFaulted(
            at_s=time.monotonic(),
            rank=slot.rank,
            pid=slot.pid,
            boundary=slot.lost_boundary,
            device_fault=message.device_fault,
            reason=message.error,
        )
        node.log(
            "rank_faulted",
            rank=slot.rank,
            pid=slot.pid,
            boundary=event.boundary,
            kind=event.kind,
            reason=event.reason,
            traceback=message.detail,
            at_s=event.at_s,
        )
        self.own_states.report_what_is_left(slot)
        node.advance(event)

    def _on_nan(self, slot: RankSlot, message: from_rank.NanFound) -> None:
        """A rank has found a NaN, in its own gradient or in reduced ones. With `stop` it waits before the step."""
        is_spread = message.step == self._nan_step + 1  # through the weights, which the first one has reached
        is_known = message.step == self._nan_step
        self._nan_step = message.step
        if is_spread:
            return
        is_stop = self.node.config.on_nan == "stop"
        step, where = message.step, message.where
        if message.is_own:
            finding = f"rank {slot.rank} has NaN in its own gradient in step {step} ({where})"
        elif is_known:
            return
        else:
            finding = f"the reduced gradients hold NaN in step {step} ({where}); only --on-nan stop can name the rank"
        self.node.log("nan_found", rank=slot.rank if message.is_own else None, step=step, where=where)
        if is_stop:
            reason = f"{finding}; no rank has taken the step (on_nan: stop)"
            self.node.advance(recovery.StopAsked(at_s=time.monotonic(), reason=reason))
        else:
            logger.warning("%s; training continues (on_nan: warn)", finding)

    def pass_on(self) -> None:
        """Pass on what ranks have reported to all others; one that has no process now hears it when it has greeted."""
        new, self._to_pass_on = self._to_pass_on, []
        if new:
            present = self.node.job.generation
            self._passed_on = [one for one in [*self._passed_on, *new] if one[1].generation >= present]
            self.actuators.order_all(node_orders.Broadcast(new))

    def _on_frozen(self, slot: RankSlot, message: from_rank.Frozen) -> None:
        """A survivor has quiesced at a boundary."""
        slot.take_journal(message.journal)
        if (message.generation, message.boundary) not in self._voided:  # once, not for each survivor
            self._voided.add((message.generation, message.boundary))
            self.actuators.order_all(node_orders.VoidBeyond(message.boundary))
        self._compare_journals(slot, message.generation)
        self.node.advance(
            recovery.RankFrozen(
                at_s=time.monotonic(),
                rank=slot.rank,
                generation=message.generation,
                boundary=message.boundary,
                digest=message.digest,
                has_group=message.has_group,
                is_at_end=self.node.board.get(slot.rank, Field.ENDED) != 0,
            )
        )

    def _compare_journals(self, last: RankSlot, generation: int) -> None:
        """A survivor is quiesced; if it is the last one, all must have issued the same collectives."""
        job = self.node.job
        member = job.members[last.rank]
        is_last = job.count(MemberFlag.MUST_FREEZE) == (member.life is recovery.Life.LIVE and member.frozen is None)
        if not is_last or generation != job.generation:
            return
        slots = [self.node.slots[rank] for rank in job.survivors]
        issued = {
            slot.rank: {name: group.issued for name, group in slot.journal.items()} for slot in slots if slot.journal
        }
        found = find_difference(issued)
        if found is None:
            return
        fields: dict[str, Any] = {"at_s": time.monotonic(), "reason": found.sentence}
        self.node.log("journals_differ", ranks=found.ranks, **fields)
        if not found.ranks:
            self.node.advance(recovery.MismatchFound(rank=last.rank, generation=generation, **fields))
        hung = []  # all known by their present processes, before the first one's is ended
        for odd in (self.node.slots[rank] for rank in found.ranks):
            boundary = self.node.board.get(odd.rank, Field.APPLIED)
            self.actuators.order(odd.rank, node_orders.VoidEvidence(odd.rank))
            hung.append(
                recovery.RankHung(rank=odd.rank, pid=odd.pid, boundary=boundary, detected_after_s=0.0, **fields)
            )
        for event in hung:
            self.node.advance(event)
