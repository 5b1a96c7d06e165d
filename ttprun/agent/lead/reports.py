"""What ranks report: passed on, noted, or made into events of the state machine. Begin with `_ROWS`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.base.ground import Failure, FaultInjection
from ttprun.agent.lead.checkpoints import Checkpoints
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.incidents import Incidents, Protection
from ttprun.agent.lead.repairs import Repairs
from ttprun.agent.lead.rows import Lead, Row, Wire
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.protocol import from_rank, mindio, node_messages
from ttprun.protocol.board import Field
from ttprun.protocol.channel import Message
from ttprun.protocol.codec import Refused
from ttprun.protocol.rank_events import MismatchFound, RankEvent, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.protocol.snapshot_messages import Dumped, SnapshotSize, SnapshotTaken
from ttprun.recovery.replicas import find_difference

logger = logging.getLogger("ttprun")


class Handling(NamedTuple):
    """What becomes of a message.

    take   of Reports, or of one of its parts; given the slot whose process has sent it, and the message
    part   what protection does not need, and fails by itself (loop.py); "": no such part
    """

    take: str
    part: str = ""


_ROWS: dict[type[Message], Handling] = {
    from_rank.Present: Handling("_on_present"),
    from_rank.Put: Handling("_on_put"),
    # Protection.
    from_rank.RankProtected: Handling("_on_protected"),
    from_rank.RankUnprotected: Handling("protection.note_unprotected"),
    from_rank.RankHindered: Handling("protection.note_hindered"),
    from_rank.RankTrainsAlone: Handling("protection.note_membership"),
    from_rank.RankJoined: Handling("protection.note_membership"),
    from_rank.CollectiveStep: Handling("comparisons.note_collective_steps"),
    # Faults.
    from_rank.ScriptError: Handling("node.note_script_error"),
    from_rank.RankFaulted: Handling("_on_faulted"),
    from_rank.Broken: Handling("hang_detector.take_broken"),
    from_rank.StoppedDivergent: Handling("_on_stopped"),
    from_rank.NanFound: Handling("_on_nan"),
    MismatchFound: Handling("_on_mismatch"),
    # A repair.
    from_rank.RankFrozen: Handling("_on_frozen"),
    from_rank.RankReplayed: Handling("_on_replayed"),
    from_rank.StateSent: Handling("_advance"),
    from_rank.RankRepaired: Handling("_advance"),
    from_rank.RankRebuilt: Handling("_advance"),
    from_rank.RankReissued: Handling("_advance"),
    from_rank.Unaligned: Handling("repairs.take"),
    from_rank.Aligned: Handling("repairs.take"),
    # Copies of a rank's state.
    from_rank.OwnStateKept: Handling("protection.note_own_state"),
    from_rank.StateMirrored: Handling("comparisons.note_mirrored"),
    from_rank.MirrorCopied: Handling("comparisons.note_mirror_copied"),
    from_rank.Held: Handling("comparisons.take", "comparisons"),
    SnapshotSize: Handling("_on_snapshot_size", "snapshots"),
    SnapshotTaken: Handling("snapshots.take", "snapshots"),
    Dumped: Handling("checkpoints.take_dumped"),
    # What is not proved.
    from_rank.Compared: Handling("_on_compared", "incident notes"),
    from_rank.NotProved: Handling("_on_not_proved", "incident notes"),
    from_rank.Note: Handling("_on_note", "incident notes"),
    # Injected faults.
    from_rank.FaultStruck: Handling("injections.struck", "fault injection"),
    from_rank.FaultFailed: Handling("injections.failed", "fault injection"),
    # A framework with callbacks of its own.
    **dict.fromkeys(get_args(mindio.Report), Handling("repairs.take")),
    mindio.Prepared: Handling("_on_prepared"),
    Refused: Handling("_on_refused"),
}


@dataclass
class Reports:
    """Takes the messages of all ranks, on whatever nodes, and gives each to the part that it is for.

    _passed_on  what each rank has reported to all others in the present generation, by rank
    _to_pass_on  of that, what has just come
    _voided  (generation, boundary): what lost ranks have recorded beyond it was ordered to be void
    _nan_step  the step in which a NaN was reported last
    """

    node: Lead
    wire: Wire
    comparisons: Comparisons
    checkpoints: Checkpoints
    incidents: Incidents
    injections: FaultInjection
    hang_detector: HangDetector
    protection: Protection
    repairs: Repairs
    snapshots: Snapshots
    _passed_on: list[tuple[int, from_rank.Put]] = field(default_factory=list, init=False)
    _to_pass_on: list[tuple[int, from_rank.Put]] = field(default_factory=list, init=False)
    _voided: set[tuple[int, int]] = field(default_factory=set, init=False)
    _nan_step: int = field(default=-2, init=False)

    def take(self, slot: Row, message: Message) -> None:
        """A message has come from the process of a slot."""
        row = _ROWS.get(type(message))
        if row is None:
            self.node.refuse(slot.rank, f"{type(message).__name__} is no message of a rank")
            return
        if isinstance(message, RankEvent):
            message = replace(message, at_s=time.monotonic(), rank=slot.rank)
        take = attrgetter(row.take)(self)
        if row.part:
            self.node.domains.run(row.part, lambda: take(slot, message))
        else:
            take(slot, message)

    def _advance(self, slot: Row, message: RankEvent) -> None:
        """A message that is an event as it is."""
        self.node.advance(message)

    def _on_refused(self, slot: Row, message: Refused) -> None:
        self.node.refuse(slot.rank, message.reason)

    def _on_protected(self, slot: Row, message: from_rank.RankProtected) -> None:
        slot.is_protected = True
        self.node.advance(message)

    def _on_mismatch(self, slot: Row, message: MismatchFound) -> None:
        if message.detail:
            self.node.log("mismatch_detail", rank=slot.rank, detail=message.detail)
        reason = message.reason if message.is_near else message.reason.with_cure()
        self.node.advance(replace(message, reason=reason, detail=""))

    def _on_replayed(self, slot: Row, message: from_rank.RankReplayed) -> None:
        where = {"generation": message.generation, "boundary": message.boundary}
        self.node.log("rank_replayed", rank=slot.rank, **where, setup_s=message.setup_s)
        self.incidents.note_setup(message.setup_s)
        self.node.advance(message)

    def _on_prepared(self, slot: Row, message: mindio.Prepared) -> None:
        self.repairs.take(slot, message)
        self.take(slot, from_rank.RankReplayed(message.generation, message.boundary, 0.0))

    def _on_snapshot_size(self, slot: Row, message: SnapshotSize) -> None:
        self.snapshots.share_bytes = message.bytes

    def _on_compared(self, slot: Row, message: from_rank.Compared) -> None:
        self.incidents.note_compared(slot.rank, message.equal, message.not_proved)

    def _on_not_proved(self, slot: Row, message: from_rank.NotProved) -> None:
        event, key = ("not_recorded", "sentences") if message.is_unrecorded else ("not_proved", "names")
        self.node.log(event, rank=slot.rank, **{key: [*map(str, message.reasons)]})
        self.incidents.not_proved.take(slot.rank, message.reasons, message.is_unrecorded)

    def _on_note(self, slot: Row, message: from_rank.Note) -> None:
        self.node.log("note", rank=slot.rank, text=message.text)
        logger.warning("rank %d: %s", slot.rank, message.text)

    def _on_present(self, slot: Row, message: from_rank.Present) -> None:
        """A process has greeted: it is sent what it has missed; what is new it gets by `pass_on`, as all others do."""
        self._forget_older()
        slot.main_thread, slot.is_present = message.main_thread, True
        self.comparisons.report_owners(slot)
        for sender, put in self._passed_on:
            if sender != slot.rank:
                slot.send_if_present(put)
        self.injections.greeted(slot)

    def _on_stopped(self, slot: Row, message: from_rank.StoppedDivergent) -> None:
        """A rank that has diverged stands behind a boundary, and has given the others nothing since."""
        recorded = self.node.board.get(slot.rank, Field.RECORDED)
        at_s, reason = time.monotonic(), slot.divergence
        diverged = recovery.RankDiverged(at_s=at_s, rank=slot.rank, pid=slot.pid, boundary=recorded, reason=reason)
        self.node.advance(diverged)
        if not slot.is_lost:  # it came while a checkpoint was written, say: the next comparison finds it again
            slot.divergence = ""

    def _on_faulted(self, slot: Row, message: from_rank.RankFaulted) -> None:
        """A transient error has ended the script of a rank, which waits for orders."""
        node = self.node
        slot.fault(node.reached(slot.rank, node.board.get(slot.rank, Field.RECORDED)))
        self.comparisons.report_owners(slot)
        node.note_failure(Failure(slot.rank, slot.pid, 1, message.reason, message.detail))
        where = {"pid": slot.pid, "boundary": slot.lost_boundary}
        event = replace(message, **where, detected_after_s=0.0, detail="")
        about = {"kind": event.kind, "reason": event.reason, "traceback": message.detail}
        node.log("rank_faulted", rank=slot.rank, **where, **about, at_s=event.at_s)
        node.report_what_is_left(slot.rank)
        node.advance(event)

    def _on_nan(self, slot: Row, message: from_rank.NanFound) -> None:
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
            self.node.advance(StopAsked(at_s=time.monotonic(), reason=reason))
        else:
            logger.warning("%s; training continues (on_nan: %s)", finding, self.node.config.on_nan)

    def _on_put(self, slot: Row, put: from_rank.Put) -> None:
        """A rank reports something to all others."""
        slot.reported_in = put.generation
        self._to_pass_on.append((slot.rank, put))

    def pass_on(self) -> None:
        """Pass on what ranks have reported to all others; one that has no process now hears it when it has greeted."""
        new, self._to_pass_on = self._to_pass_on, []
        self._forget_older()
        if new:
            self._passed_on += [report for report in new if report[1].generation >= self.node.job.generation]
            self.wire.order_all(node_messages.Broadcast(new))

    def _forget_older(self) -> None:
        """What was reported in an earlier generation is void."""
        present = self.node.job.generation
        if self._passed_on and self._passed_on[0][1].generation < present:  # once, not for each process that greets
            self._passed_on = [report for report in self._passed_on if report[1].generation >= present]

    def _on_frozen(self, slot: Row, message: from_rank.RankFrozen) -> None:
        """A survivor has quiesced at a boundary."""
        slot.journal = message.journal
        if (message.generation, message.boundary) not in self._voided:  # once, not for each survivor
            self._voided.add((message.generation, message.boundary))
            self.wire.order_all(node_messages.VoidBeyond(message.boundary))
            self.node.void_beyond(message.boundary, self.node.slots)
        self._compare_journals(slot, message.generation)
        is_at_end = self.node.board.get(slot.rank, Field.ENDED) != 0
        self.node.advance(replace(message, at_s=time.monotonic(), journal={}, is_at_end=is_at_end))

    def _compare_journals(self, last: Row, generation: int) -> None:
        """A survivor is quiesced; if it is the last one, all must have issued the same collectives.

        In a job that ends nobody issues them again, and all hold the state of the boundary.
        """
        job = self.node.job
        member = job.members[last.rank]
        is_last = job.count("must freeze") == (member.life is recovery.RankState.LIVE and member.frozen is None)
        if not is_last or generation != job.generation or job.ending is not None:
            return
        slots = [self.node.slots[rank] for rank in job.survivors]
        issued = {
            slot.rank: {name: group.issued for name, group in slot.journal.items()} for slot in slots if slot.journal
        }
        difference = find_difference(issued)
        if difference is None:
            return
        fields: dict[str, Any] = {"at_s": time.monotonic(), "reason": difference.sentence}
        self.node.log("journals_differ", ranks=difference.ranks, **fields)
        if not difference.ranks:
            why = Reason("other-collective", difference.sentence)
            self.node.advance(MismatchFound(at_s=fields["at_s"], rank=last.rank, generation=generation, reason=why))
        hung = []  # all known by their present processes, before the first one's is ended
        for odd in (self.node.slots[rank] for rank in difference.ranks):
            boundary = self.node.board.get(odd.rank, Field.APPLIED)
            self.wire.order(odd.rank, node_messages.VoidEvidence(odd.rank))
            hung.append(
                recovery.RankHung(rank=odd.rank, pid=odd.pid, boundary=boundary, detected_after_s=0.0, **fields)
            )
        for event in hung:
            self.node.advance(event)
