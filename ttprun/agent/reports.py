"""What ranks tell the agent: passed on, noted, or made into events of the state machine. Begin with `Reports.take`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.agent.failures import Failure
from ttprun.board import Field
from ttprun.channel import Message
from ttprun.rank.verification import PROOF_STEPS
from ttprun.recovery.journals import find_difference
from ttprun.recovery.replicas import Replicas

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor

logger = logging.getLogger("ttprun")

_REPORTS: dict[str, Any] = {
    "frozen": recovery.RankFrozen,
    "replayed": recovery.RankReplayed,
    "state_sent": recovery.StateSent,
    "repaired": recovery.RankRepaired,
    "rebuilt": recovery.RankRebuilt,
    "reissued": recovery.RankReissued,
    "mismatch": recovery.MismatchFound,
}


class Reports:
    """Takes the messages of the ranks that a supervisor looks after."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._replicas = Replicas(world_size=1)
        self._repaired: tuple[tuple[int, ...], int] = ((), 0)  # ranks, boundary
        self._told: list[tuple[int, Message]] = []  # what each rank has told all others in the present generation
        self._nan_step = -2

    def take(self, seat: Seat, message: Message) -> None:
        """A message has come from the process of a seat."""
        op = message["op"]
        if op == "put":
            self._pass_on(seat, message)
        elif op == "ready":
            pass  # a standby that was needed before it was ready
        elif op == "modules":
            self._supervisor.standbys.warm_up(message["modules"], message["files"])
            self._supervisor.watch.start_standbys()
        elif op == "present":
            seat.main_thread = message["main_thread"]
            seat.greet()
            for teller, put in self._told:
                if teller != seat.rank:
                    seat.tell_news(put)
            self._supervisor.watch.greeted(seat)
            self._supervisor.injections.greeted(seat)
        elif op == "broken":
            self._supervisor.lookout.take_broken(seat, message)
        elif op == "script_error":
            if message["traceback"] and not any(other.script_error for other in self._supervisor.seats):
                with contextlib.suppress(OSError):  # whoever read it has gone
                    os.write(2, message["traceback"].encode(errors="backslashreplace"))
            seat.script_error = message["error"]
            seat.device_fault = message["device_fault"]
            seat.traceback = "" if message["traceback"] else message["detail"]
            self._supervisor.log("script_error", rank=seat.rank, error=message["error"], traceback=message["detail"])
        elif op == "faulted":
            self._on_faulted(seat, message)
        elif op == "fault_struck":
            self._supervisor.injections.struck(seat, message)
        elif op == "fault_failed":
            self._supervisor.injections.failed(seat, message)
        elif op == "snapshot_size":
            self._supervisor.snapshots.share_bytes = message["bytes"]
        elif op == "snapshot":
            self._supervisor.snapshots.take(seat, message)
        elif op in ("dumped", "renamed", "replicas", "data_parallel", "elastic", "scheduler", "notified", "paused"):
            self._supervisor.repairs.take(seat, message)
        elif op == "digest":
            self._compare(seat, message["boundary"], message["digest"])
        elif op == "compared":
            self._note_compared(seat.rank, message["equal"], message["unproved"])
        elif op == "aside":
            self._on_aside(seat)
        elif op == "nan":
            self._on_nan(seat, message)
        elif op == "device":
            told = {key: value for key, value in message.items() if key != "op"}
            self._supervisor.log("device_ready", rank=seat.rank, **told)
        elif op == "not_proved":
            self._supervisor.log("not_proved", rank=seat.rank, names=message["names"])
            self._supervisor.status.not_proved.take(seat.rank, tuple(message["names"]))
        elif op == "note":
            self._supervisor.log("note", rank=seat.rank, text=message["text"])
            logger.warning("rank %d: %s", seat.rank, message["text"])
        else:
            self._on_report(seat, op, message)

    def begin_group(self, world_size: int) -> None:
        """All ranks are new: nothing is known of their weights."""
        self._replicas = Replicas(world_size=world_size)
        self._repaired = ((), 0)
        self._nan_step = -2

    def note_repair(self, ranks: tuple[int, ...], boundary: int) -> None:
        """These ranks get the others' weights of a boundary, which is checked: there all are alike."""
        self._repaired = (ranks, boundary)
        self._replicas = Replicas(world_size=len(self._supervisor.seats), agreed_at=boundary)

    def _compare(self, seat: Seat, boundary: int, digest: str) -> None:
        """What a rank has said of its weights; in a recovery, before it goes on, they are compared anyhow."""
        job = self._supervisor.job
        if job.incident is not None and job.phase is not recovery.Phase.RESUMING:
            return
        before = self._replicas
        self._replicas, divergence = before.told(seat.rank, boundary, digest)
        if before.are_alike and not self._replicas.are_alike:
            self._supervisor.log("replicas_not_alike", boundary=boundary)
        repaired, at = self._repaired
        if before.agreed_at != self._replicas.agreed_at == boundary and boundary <= at + PROOF_STEPS:
            for rank in repaired:
                self._note_compared(rank, [f"weights, those of all ranks, at boundary {boundary}"], [])
        if divergence is None:
            return
        new = [odd for odd in (self._supervisor.seats[rank] for rank in divergence.ranks) if not odd.divergence]
        if not new and divergence.ranks:
            return  # it has been told to stand aside, and is on its way there
        self._supervisor.log("replicas_diverged", **asdict(divergence))
        reason = divergence.sentence
        ranks, repaired_at = self._repaired
        is_unproved = (
            bool(ranks) and divergence.boundary <= repaired_at + PROOF_STEPS and {*divergence.ranks} <= {*ranks}
        )
        if is_unproved:
            who = ", ".join(map(str, ranks))
            reason = (
                f"since rank {who} was repaired at boundary {repaired_at} the ranks hold different weights at boundary "
                f"{divergence.boundary} ({divergence.held}): ttprun's repair has missed something that the steps use"
            )
        if is_unproved or not divergence.ranks:
            generation, at_s = job.generation, time.monotonic()
            mismatch = recovery.MismatchFound(at_s=at_s, rank=seat.rank, generation=generation, reason=reason)
            self._supervisor.advance(mismatch)
            return
        for odd in new:
            odd.divergence = divergence.sentence
            odd.tell({"op": "stand_aside"})

    def _note_compared(self, rank: int, equal: Sequence[str], unproved: Sequence[str]) -> None:
        """What of a replacement has been compared, for the incident."""
        number = self._supervisor.status.note_compared(rank, equal, unproved)
        self._supervisor.log("compared", incident=number, rank=rank, equal=equal, unproved=unproved)

    def _on_aside(self, seat: Seat) -> None:
        """A rank that has diverged stands behind a boundary, and has given the others nothing since."""
        recorded = self._supervisor.board.get(seat.local_rank, Field.RECORDED)
        at_s, reason = time.monotonic(), seat.divergence
        diverged = recovery.RankDiverged(at_s=at_s, rank=seat.rank, pid=seat.pid, boundary=recorded, reason=reason)
        self._supervisor.advance(diverged)
        if not seat.is_lost:  # it came while a checkpoint was written, say: the next comparison finds it again
            seat.divergence = ""

    def _on_faulted(self, seat: Seat, message: Message) -> None:
        """A transient error has ended the script of a rank, which waits for orders."""
        supervisor = self._supervisor
        seat.fault(supervisor.board)
        failure = Failure(seat.rank, seat.pid, 1, message["error"], message["detail"])
        supervisor.first_failure.note(failure, is_new_incident=supervisor.job.incident is None)
        event = recovery.RankFaulted(
            at_s=time.monotonic(),
            rank=seat.rank,
            pid=seat.pid,
            boundary=seat.lost_boundary,
            device_fault=message["device_fault"],
            reason=message["error"],
        )
        supervisor.log(
            "rank_faulted",
            rank=seat.rank,
            pid=seat.pid,
            boundary=event.boundary,
            kind=event.kind,
            reason=event.reason,
            traceback=message["detail"],
            at_s=event.at_s,
        )
        supervisor.advance(event)

    def _on_nan(self, seat: Seat, message: Message) -> None:
        """A rank has found a NaN in its own gradient; told to stop, it stands in front of the step."""
        is_spread = message["step"] == self._nan_step + 1  # through the weights, which the first one has reached
        self._nan_step = message["step"]
        if is_spread:
            return
        is_stop = self._supervisor.config.on_nan == "stop"
        told = f"rank {seat.rank} has NaN in its own gradient in step {message['step']} ({message['where']})"
        self._supervisor.log("nan_found", rank=seat.rank, step=message["step"], where=message["where"])
        if is_stop:
            reason = f"{told}; no rank has taken the step (on_nan: stop)"
            self._supervisor.advance(recovery.StopAsked(at_s=time.monotonic(), reason=reason))
        else:
            logger.warning("%s; training goes on (on_nan: warn)", told)

    def _pass_on(self, seat: Seat, put: Message) -> None:
        """Pass on what a rank tells all others; one that has no process now hears it when it has greeted."""
        seat.told_in = put["generation"]
        present = self._supervisor.job.generation
        self._told = [told for told in [*self._told, (seat.rank, put)] if told[1]["generation"] >= present]
        for other in self._supervisor.seats:
            if other is not seat:
                other.tell_news(put)

    def _on_report(self, seat: Seat, op: str, message: Message) -> None:
        """A message that is an event of the state machine."""
        fields: dict[str, Any] = {"at_s": time.monotonic(), "rank": seat.rank}
        if op == "unprotected":
            self._supervisor.log("rank_unprotected", rank=seat.rank, reason=message["reason"])
            for other in self._supervisor.seats:
                if other is not seat:
                    other.tell({"op": "unprotected", "reason": message["reason"]})
            self._supervisor.advance(recovery.RankUnprotected(**fields, reason=message["reason"]))
            return
        if op == "holds_alone":
            if not self._supervisor.job.unreplicated_reason:
                self._supervisor.log("rank_holds_alone", rank=seat.rank, reason=message["reason"])
            self._supervisor.advance(recovery.RankHoldsAlone(**fields, reason=message["reason"]))
            return
        if op == "protected":
            seat.is_protected = True
            self._supervisor.advance(recovery.RankProtected(**fields))
            return
        fields["generation"] = message["generation"]
        if op == "frozen":
            seat.journal = message["journal"]
            self._reset_lost_rows(seat, message["boundary"])
            fields |= {key: message[key] for key in ("boundary", "digest", "has_group")}
            self._compare_journals(seat, message["generation"])
        elif op == "replayed":
            fields["boundary"] = message["boundary"]
            self._supervisor.repairs.take(seat, message)
            told = {key: message[key] for key in ("generation", "boundary", "setup_s")}
            self._supervisor.log("rank_replayed", rank=seat.rank, **told)
        elif op in ("state_sent", "repaired"):
            fields["digest"] = message["digest"]
            if op == "repaired" and message.get("loaded"):
                fields["boundary"] = message["loaded"]
        elif op == "mismatch":
            fields["reason"] = message["reason"]
            if message.get("detail"):
                self._supervisor.log("mismatch_detail", rank=seat.rank, detail=message["detail"])
        self._supervisor.advance(_REPORTS[op](**fields))

    def _compare_journals(self, last: Seat, generation: int) -> None:
        """A survivor stands still; if it is the last one, all must have issued the same collectives."""
        job = self._supervisor.job
        is_anyone_moving = any(rank != last.rank and job.members[rank].frozen is None for rank in job.survivors)
        if is_anyone_moving or generation != job.generation:
            return
        seats = [self._supervisor.seats[rank] for rank in job.survivors]
        issued = {
            seat.rank: {name: group["issued"] for name, group in seat.journal.items()} for seat in seats if seat.journal
        }
        found = find_difference(issued)
        if found is None:
            return
        fields: dict[str, Any] = {"at_s": time.monotonic(), "reason": found.sentence}
        self._supervisor.log("journals_differ", ranks=found.ranks, **fields)
        if not found.ranks:
            self._supervisor.advance(recovery.MismatchFound(rank=last.rank, generation=generation, **fields))
        hung = []  # all told of their present processes, before the first one's is ended
        for odd in (self._supervisor.seats[rank] for rank in found.ranks):
            boundary = self._supervisor.board.get(odd.local_rank, Field.APPLIED)
            hung.append(
                recovery.RankHung(rank=odd.rank, pid=odd.pid, boundary=boundary, detected_after_s=0.0, **fields)
            )
        for event in hung:
            self._supervisor.advance(event)

    def _reset_lost_rows(self, seat: Seat, boundary: int) -> None:
        """What a lost rank had recorded beyond the boundary is void: survivors wait for its replacement's record."""
        board = self._supervisor.board
        for other in self._supervisor.seats:
            if other.lost_boundary > boundary:
                other.lost_boundary = boundary
                board.set(other.local_rank, Field.RECORDED, boundary)
