"""What ranks report: passed on, noted, or made into events of the state machine. Begin with `Reports.take`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.agent.failures import Failure
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field
from ttprun.protocol.channel import Message
from ttprun.protocol.codec import Refused
from ttprun.rank.records.recorder import Recorder
from ttprun.recovery.journals import find_difference

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor

logger = logging.getLogger("ttprun")


class Reports:
    """Takes the messages of the ranks that a supervisor looks after."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._told: list[tuple[int, from_rank.Put]] = []  # what each rank has told all others in the present generation
        self._nan_step = -2
        self._announced: set[str] = set()
        self._has_announced_end = False

    def take(self, seat: Seat, message: Message) -> None:
        """A message has come from the process of a seat."""
        supervisor = self._supervisor
        at_s, rank = time.monotonic(), seat.rank
        match message:
            case from_rank.Put():
                self._pass_on(seat, message)
            case from_rank.Ready():
                pass  # a standby that was needed before it was ready
            case from_rank.ModulesOfTorch(modules=modules, files=files):
                supervisor.standbys.warm_up(modules, files)
                supervisor.watch.start_standbys()
            case from_rank.Imported():
                starts = [other.handler.start for other in supervisor.seats]
                supervisor.standbys.preloads.note(seat.local_rank, message, starts)
            case from_rank.Present():
                self._on_present(seat, message)
            case from_rank.Protected():
                seat.is_protected = seat.had_torch = True
                supervisor.advance(recovery.RankProtected(at_s=at_s, rank=rank))
            case from_rank.Unprotected(reason=reason):
                self._on_unprotected(seat, reason)
            case from_rank.TrainsAlone() | from_rank.Joined():
                self._on_ties(seat, message)
            case from_rank.OwnStateKept():
                supervisor.own_states.note(seat, message)
            case from_rank.Hindered():
                self._on_hindered(seat, message)
            case from_rank.HoldsAlone(reason=reason):
                self._on_holds_alone(seat, reason)
            case from_rank.ScriptError():
                self._on_script_error(seat, message)
            case from_rank.Faulted():
                self._on_faulted(seat, message)
            case from_rank.Broken():
                supervisor.lookout.take_broken(seat, message)
            case from_rank.Frozen():
                self._on_frozen(seat, message)
            case from_rank.Replayed(generation=generation, boundary=boundary):
                supervisor.log("rank_replayed", rank=rank, **vars(message))
                replayed = recovery.RankReplayed(at_s=at_s, rank=rank, generation=generation, boundary=boundary)
                supervisor.advance(replayed)
            case from_rank.Prepared(generation=generation, boundary=boundary):
                supervisor.repairs.take(seat, message)
                supervisor.log("rank_replayed", rank=rank, generation=generation, boundary=boundary, setup_s=0.0)
                replayed = recovery.RankReplayed(at_s=at_s, rank=rank, generation=generation, boundary=boundary)
                supervisor.advance(replayed)
            case from_rank.StateSent(generation=generation, digest=digest):
                sent = recovery.StateSent(at_s=at_s, rank=rank, generation=generation, digest=digest)
                supervisor.advance(sent)
            case from_rank.Repaired(generation=generation, digest=digest, loaded=loaded):
                repaired = recovery.RankRepaired(
                    at_s=at_s, rank=rank, generation=generation, digest=digest, boundary=loaded or None
                )
                supervisor.advance(repaired)
            case from_rank.Rebuilt(generation=generation):
                supervisor.advance(recovery.RankRebuilt(at_s=at_s, rank=rank, generation=generation))
            case from_rank.Reissued(generation=generation):
                supervisor.advance(recovery.RankReissued(at_s=at_s, rank=rank, generation=generation))
            case from_rank.Mismatch(generation=generation, reason=reason, detail=detail):
                if detail:
                    supervisor.log("mismatch_detail", rank=rank, detail=detail)
                supervisor.advance(recovery.MismatchFound(at_s=at_s, rank=rank, generation=generation, reason=reason))
            case from_rank.Compared(equal=equal, not_proved=not_proved):
                supervisor.comparisons.note(rank, equal, not_proved)
            case from_rank.DeviceReady(counters=counters):
                told = {key: value for key, value in vars(message).items() if key != "counters"}
                supervisor.log("device_ready", rank=rank, **told, **counters)
            case from_rank.Held():
                supervisor.comparisons.take(seat, message)
            case from_rank.SteppedAside():
                self._on_aside(seat)
            case from_rank.NanFound():
                self._on_nan(seat, message)
            case from_rank.SnapshotSize(bytes=share_bytes):
                supervisor.snapshots.share_bytes = share_bytes
            case from_rank.SnapshotTaken():
                supervisor.snapshots.take(seat, message)
            case from_rank.Dumped():
                supervisor.checkpoints.take_dumped(seat, message)
            case from_rank.FaultStruck():
                supervisor.injections.struck(seat, message)
            case from_rank.FaultFailed():
                supervisor.injections.failed(seat, message)
            case from_rank.NotProved(names=names):
                supervisor.log("not_proved", rank=rank, names=names)
                supervisor.status.not_proved.take(rank, names)
            case from_rank.Note(text=text):
                supervisor.log("note", rank=rank, text=text)
                logger.warning("rank %d: %s", rank, text)
            case (
                from_rank.ReplicasDeclared()
                | from_rank.DataParallelDeclared()
                | from_rank.ElasticDeclared()
                | from_rank.SchedulerRegistered()
                | from_rank.SchedulerAsked()
                | from_rank.Paused()
                | from_rank.SavedByFramework()
                | from_rank.Renamed()
            ):
                supervisor.repairs.take(seat, message)
            case Refused(reason=reason):
                self._refuse(seat, reason)
            case _:
                self._refuse(seat, f"{type(message).__name__} is no message of a rank")

    def _refuse(self, seat: Seat, reason: str) -> None:
        """A rank has sent what is no message, which has no effect: what should have come instead has its deadline."""
        self._supervisor.log("message_refused", rank=seat.rank, reason=reason)
        logger.warning("a message of rank %d is ignored: %s", seat.rank, reason)

    def _on_present(self, seat: Seat, message: from_rank.Present) -> None:
        """A process has greeted: it is sent what it has missed."""
        seat.main_thread = message.main_thread
        seat.greet()
        self._supervisor.comparisons.tell_owners(seat)
        for sender, put in self._told:
            if sender != seat.rank:
                seat.tell_news(put)
        self._supervisor.watch.greeted(seat)
        self._supervisor.injections.greeted(seat)

    def _on_script_error(self, seat: Seat, message: from_rank.ScriptError) -> None:
        """An exception ends a script; before the first step its traceback is printed here, once."""
        if message.traceback and not any(other.script_error for other in self._supervisor.seats):
            with contextlib.suppress(OSError):  # whoever read it has gone
                os.write(2, message.traceback.encode(errors="backslashreplace"))
        seat.script_error = message.error
        seat.device_fault = message.device_fault
        seat.traceback = "" if message.traceback else message.detail
        self._supervisor.log("script_error", rank=seat.rank, error=message.error, traceback=message.detail)

    def begin_group(self) -> None:
        """All ranks are new."""
        self._nan_step = -2

    def _on_aside(self, seat: Seat) -> None:
        """A rank that has diverged stands behind a boundary, and has given the others nothing since."""
        recorded = self._supervisor.board.get(seat.local_rank, Field.RECORDED)
        at_s, reason = time.monotonic(), seat.divergence
        diverged = recovery.RankDiverged(at_s=at_s, rank=seat.rank, pid=seat.pid, boundary=recorded, reason=reason)
        self._supervisor.advance(diverged)
        if not seat.is_lost:  # it came while a checkpoint was written, say: the next comparison finds it again
            seat.divergence = ""

    def _on_faulted(self, seat: Seat, message: from_rank.Faulted) -> None:
        """A transient error has ended the script of a rank, which waits for orders."""
        supervisor = self._supervisor
        seat.fault(supervisor.board)
        seat.lost_boundary = supervisor.own_states.reached(seat, seat.lost_boundary)
        self._supervisor.comparisons.tell_owners(seat)
        failure = Failure(seat.rank, seat.pid, 1, message.error, message.detail)
        supervisor.first_failure.note(failure, is_new_incident=supervisor.job.incident is None)
        event = recovery.RankFaulted(
            at_s=time.monotonic(),
            rank=seat.rank,
            pid=seat.pid,
            boundary=seat.lost_boundary,
            device_fault=message.device_fault,
            reason=message.error,
        )
        supervisor.log(
            "rank_faulted",
            rank=seat.rank,
            pid=seat.pid,
            boundary=event.boundary,
            kind=event.kind,
            reason=event.reason,
            traceback=message.detail,
            at_s=event.at_s,
        )
        supervisor.own_states.tell_what_is_left(seat)
        supervisor.advance(event)

    def _on_nan(self, seat: Seat, message: from_rank.NanFound) -> None:
        """A rank has found a NaN, in its own gradient or in reduced ones. Told to stop, it waits before the step."""
        is_spread = message.step == self._nan_step + 1  # through the weights, which the first one has reached
        is_known = message.step == self._nan_step
        self._nan_step = message.step
        if is_spread:
            return
        is_stop = self._supervisor.config.on_nan == "stop"
        step, where = message.step, message.where
        if message.is_own:
            told = f"rank {seat.rank} has NaN in its own gradient in step {step} ({where})"
        elif is_known:
            return
        else:
            told = f"the reduced gradients hold NaN in step {step} ({where}); only --on-nan stop can name the rank"
        self._supervisor.log("nan_found", rank=seat.rank if message.is_own else None, step=step, where=where)
        if is_stop:
            reason = f"{told}; no rank has taken the step (on_nan: stop)"
            self._supervisor.advance(recovery.StopAsked(at_s=time.monotonic(), reason=reason))
        else:
            logger.warning("%s; training continues (on_nan: warn)", told)

    def _pass_on(self, seat: Seat, put: from_rank.Put) -> None:
        """Pass on what a rank tells all others; one that has no process now hears it when it has greeted."""
        seat.told_in = put.generation
        present = self._supervisor.job.generation
        self._told = [told for told in [*self._told, (seat.rank, put)] if told[1].generation >= present]
        for other in self._supervisor.seats:
            if other is not seat:
                other.tell_news(put)

    def _on_unprotected(self, seat: Seat, reason: str) -> None:
        """No rank can be repaired any more."""
        supervisor = self._supervisor
        supervisor.log("rank_unprotected", rank=seat.rank, reason=reason)
        is_first = not supervisor.job.unprotected_reason
        supervisor.advance(recovery.RankUnprotected(at_s=time.monotonic(), rank=seat.rank, reason=reason))
        if is_first:
            self._pass_on_unprotected(seat)
            self._announce(seat, reason)

    def _on_ties(self, seat: Seat, message: from_rank.TrainsAlone | from_rank.Joined) -> None:
        """A rank has to do with others, or with none; one that cannot be repaired may be of a group from now on."""
        supervisor, is_joined = self._supervisor, isinstance(message, from_rank.Joined)
        is_first = not supervisor.job.unprotected_reason
        event = recovery.RankJoined if is_joined else recovery.RankTrainsAlone
        supervisor.advance(event(at_s=time.monotonic(), rank=seat.rank))
        if is_first:
            self._pass_on_unprotected(seat)

    def _pass_on_unprotected(self, seat: Seat) -> None:
        """If no rank can be repaired any more because of this one, the others need not record anything for it."""
        reason = self._supervisor.job.unprotected_reason
        for other in self._supervisor.seats:
            if other is not seat and reason:
                other.tell(from_rank.Unprotected(reason))

    def _on_holds_alone(self, seat: Seat, reason: str) -> None:
        """No rank can be repaired from another one."""
        supervisor = self._supervisor
        is_first = not supervisor.job.unreplicated_reason
        if is_first:
            supervisor.snapshots.take_one_at_once()
            supervisor.log("rank_holds_alone", rank=seat.rank, reason=reason)
        supervisor.advance(recovery.RankHoldsAlone(at_s=time.monotonic(), rank=seat.rank, reason=reason))
        if is_first:
            self._announce(seat, reason)

    def _on_frozen(self, seat: Seat, message: from_rank.Frozen) -> None:
        """A survivor has quiesced at a boundary."""
        seat.journal = message.journal
        self._reset_lost_rows(seat, message.boundary)
        self._compare_journals(seat, message.generation)
        self._supervisor.advance(
            recovery.RankFrozen(
                at_s=time.monotonic(),
                rank=seat.rank,
                generation=message.generation,
                boundary=message.boundary,
                digest=message.digest,
                has_group=message.has_group,
            )
        )

    def _on_hindered(self, seat: Seat, message: from_rank.Hindered) -> None:
        """Where a rank stands now cannot be replayed, or can be again."""
        supervisor, why, boundary = self._supervisor, message.reason, message.boundary
        supervisor.log("rank_hindered", rank=seat.rank, boundary=boundary, reason=why)
        was_hindered = bool(supervisor.job.hindrance)
        supervisor.advance(recovery.RankHindered(at_s=time.monotonic(), rank=seat.rank, reason=why))
        if why:
            self._announce(seat, why)
        elif was_hindered and not supervisor.job.hindrance and not self._has_announced_end:
            self._has_announced_end = True
            logger.warning("from step %d on a lost rank can be replaced", boundary)

    def _announce(self, seat: Seat, why: str) -> None:
        """Say on the console why no rank can be replaced any more, and what that means; once a run, not once a rank."""
        job = self._supervisor.job
        if why in self._announced or job.settings.rungs.isdisjoint(("replace", "rerun", "rewind")):
            return
        self._announced.add(why)
        if recovery.is_alone(job, seat.rank) and job.settings.world_size > 1:
            kept = self._supervisor.own_states.newest(seat)
            cost = recovery.cost_of_a_loss_alone(job, seat.rank, None, kept)
            logger.warning("rank %d cannot be repaired: %s. If it is lost, %s", seat.rank, why, cost)
            return
        cost = recovery.cost_of_a_loss(job)
        logger.warning("no rank can be replaced: rank %d reports: %s. If a rank is lost, %s", seat.rank, why, cost)

    def _compare_journals(self, last: Seat, generation: int) -> None:
        """A survivor stands still; if it is the last one, all must have issued the same collectives."""
        job = self._supervisor.job
        is_anyone_moving = any(rank != last.rank and job.members[rank].frozen is None for rank in job.survivors)
        if is_anyone_moving or generation != job.generation:
            return
        seats = [self._supervisor.seats[rank] for rank in job.survivors]
        issued = {
            seat.rank: {name: group.issued for name, group in seat.journal.items()} for seat in seats if seat.journal
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
            # What it gave to this step was wrong, so its replacement must not be measured against that.
            Recorder(odd.record_fd, self._supervisor.config.record_limit_mib << 20).evidence.clear()
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
