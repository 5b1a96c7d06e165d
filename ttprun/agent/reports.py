"""What ranks report: passed on, noted, or made into events of the state machine. Begin with `Reports.take`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.agent.failures import Failure
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Field
from ttprun.protocol.channel import Message
from ttprun.protocol.codec import Refused
from ttprun.rank.checks.verification import PROOF_STEPS
from ttprun.recovery.journals import find_difference
from ttprun.recovery.replicas import Divergence, Look, Looks, Replicas, in_short

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor

logger = logging.getLogger("ttprun")

LOOK_AHEAD = 20  # boundaries, by which all ranks have heard of it


class Reports:
    """Takes the messages of the ranks that a supervisor looks after."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._looks = Looks(world_size=1)
        self._names: dict[str, str] = {}  # of parameters, for people
        self._repaired: tuple[tuple[int, ...], int] = ((), 0)  # ranks, boundary
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
                seat.is_protected = True
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
                self._note_compared(rank, equal, not_proved)
            case from_rank.DeviceReady(counters=counters):
                told = {key: value for key, value in vars(message).items() if key != "counters"}
                supervisor.log("device_ready", rank=rank, **told, **counters)
            case from_rank.Held():
                self._compare(seat, message)
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
        self.tell_owners(seat)
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

    def begin_group(self, world_size: int) -> None:
        """All ranks are new: nothing is known of their weights."""
        self._looks = Looks(world_size=world_size)
        self._repaired = ((), 0)
        self._nan_step = -2

    def begin_resumed(self, replicas: Replicas) -> None:
        """The ranks go on from a checkpoint, whose writers were replicas so far."""
        self._looks = replace(self._looks, replicas=replicas)
        self._names |= replicas.names

    def note_repair(self, ranks: tuple[int, ...], boundary: int) -> None:
        """These ranks get the others' weights of a boundary, which is checked: there all are alike."""
        before, repaired_at = self._repaired
        self._repaired = ((*before, *ranks) if repaired_at == boundary else ranks, boundary)
        self._looks = replace(self._looks, agreed_at=boundary, reported={})

    def _compare(self, seat: Seat, message: from_rank.Held) -> None:
        """A rank reports digests of what it holds; the last one's report shows who is a replica of whom."""
        before = self._looks
        self._names |= message.names
        self._looks, look = before.told(seat.rank, message.boundary, message.held, message.is_full)
        if look is None:
            return
        if look.parted and self._is_proof(look):
            self._looks = replace(self._looks, replicas=before.replicas)
            what = f"{self.names_of(look.parted)}, or its gradient or optimizer state"
            self._refuse_repair(seat, look.boundary, what)
            return
        if look.is_full or look.parted:
            self.note_replicas(self._looks.replicas, look.boundary)
        repaired, repaired_at = self._repaired
        if look.is_full and not look.parted and look.divergence is None and look.boundary <= repaired_at + PROOF_STEPS:
            everyone = range(len(self._supervisor.seats))
            for rank in (one for one in sorted({*repaired}) if self._looks.replicas.peers(one, everyone)):
                equal = f"weights, gradients and optimizer state, those of its replicas, at boundary {look.boundary}"
                self._note_compared(rank, [equal], [])
        job = self._supervisor.job
        if look.divergence is not None and (job.incident is None or job.phase is recovery.Phase.RESUMING):
            self._answer_divergence(seat, look.divergence)

    def _is_proof(self, look: Look) -> bool:
        """Whether a rank that was repaired a moment ago has parted from those that it was repaired from."""
        ranks, repaired_at = self._repaired
        everyone = range(len(self._supervisor.seats))
        if not ranks or look.boundary > repaired_at + PROOF_STEPS or {*ranks} == {*everyone}:
            return False
        known = self._supervisor.job.replicas.parted
        return any(
            known.get(key, owners)[rank] == known.get(key, owners)[other] or key not in known
            for key, owners in look.parted.items()
            for rank in ranks
            for other in everyone
            if owners[rank] != owners[other]
        )

    def _refuse_repair(self, seat: Seat, boundary: int, held: str) -> None:
        """What the repaired ranks do is not what the lost ones did.

        held   which ranks hold what
        """
        ranks, repaired_at = self._repaired
        who = ", ".join(map(str, sorted({*ranks})))
        reason = (
            f"since rank {who} was repaired at boundary {repaired_at} the ranks hold different weights at boundary "
            f"{boundary} ({held}): ttprun's repair has missed something that the steps use"
        )
        self._mismatch(seat, reason)

    def _mismatch(self, seat: Seat, reason: str) -> None:
        job = self._supervisor.job
        fields: dict[str, Any] = {"at_s": time.monotonic(), "generation": job.generation, "reason": reason}
        self._supervisor.advance(recovery.MismatchFound(rank=seat.rank, **fields))

    def note_replicas(self, replicas: Replicas, boundary: int) -> None:
        """It is known who is a replica of whom: the machine, the ranks and the operator are told what is new."""
        supervisor = self._supervisor
        replicas = replace(replicas, names={key: self._names.get(key, key) for key in replicas.parted})
        self._looks = replace(self._looks, replicas=replicas)
        before = supervisor.job.replicas
        if replicas == before:
            return
        supervisor.advance(recovery.RanksCompared(at_s=time.monotonic(), replicas=replicas))
        if replicas.parted == before.parted:
            return
        supervisor.log("replicas_parted", boundary=boundary, names=replicas.all_names, groups=replicas.groups)
        logger.warning("%s", self._cost_of(replicas))
        for seat in supervisor.seats:
            self.tell_owners(seat)
        if replicas.has_single_holders:
            supervisor.snapshots.take_one_at_once()

    def names_of(self, keys: Iterable[str]) -> str:
        """What the script calls these parameters, the first few."""
        return in_short([self._names.get(key, key) for key in keys])

    def look_soon(self, boundary: int) -> None:
        """Replicas have been found to differ: all ranks are asked for a full look at one boundary, a little later."""
        for seat in self._supervisor.seats:
            seat.tell_news(to_rank.LookAt(boundary + LOOK_AHEAD))

    def tell_owners(self, seat: Seat) -> None:
        """Let a rank know what not all ranks hold alike, which it must write into a snapshot itself."""
        owners = self._looks.replicas.parted
        if owners:
            seat.tell_news(to_rank.NotAlike({key: list(ranks) for key, ranks in owners.items()}))

    def _cost_of(self, replicas: Replicas) -> str:
        """What the operator must know of ranks that are no replicas of each other."""
        names, supervisor = replicas.all_names, self._supervisor
        differ = "parameters differ" if len(names) > 1 else "parameter differs"
        told = f"{len(names)} {differ} between the ranks ({in_short(names)})"
        if not replicas.has_single_holders:
            groups = " and ".join(", ".join(map(str, ranks)) for ranks in replicas.groups)
            return f"{told}: the ranks {groups} hold the same, and a lost rank is repaired from those of its group"
        told = f"{told}: no other rank holds what such a rank holds, so none can be replaced"
        if supervisor.snapshots.is_off or "rewind" not in supervisor.job.settings.rungs:
            return f"{told}; no snapshots are taken, so a fault restarts the group (--snapshot-every)"
        every = supervisor.config.snapshot_every
        return f"{told}; after a fault all ranks go back to the newest snapshot (--snapshot-every {every})"

    def _answer_divergence(self, seat: Seat, divergence: Divergence) -> None:
        """Replica peers hold different weights, though they were alike and have had the same gradients."""
        new = [odd for odd in (self._supervisor.seats[rank] for rank in divergence.ranks) if not odd.divergence]
        if not new and divergence.ranks:
            return  # it has been told to stand aside, and is on its way there
        self._supervisor.log("replicas_diverged", **asdict(divergence))
        reason = divergence.sentence
        ranks, repaired_at = self._repaired
        refutes_repair = (
            bool(ranks) and divergence.boundary <= repaired_at + PROOF_STEPS and {*divergence.ranks} <= {*ranks}
        )
        if refutes_repair:
            self._refuse_repair(seat, divergence.boundary, divergence.held)
            return
        if not divergence.ranks:
            self._mismatch(seat, reason)
            return
        for odd in new:
            odd.divergence = divergence.sentence
            odd.tell(to_rank.StandAside())

    def _note_compared(self, rank: int, equal: Sequence[str], not_proved: Sequence[str]) -> None:
        """What of a replacement has been compared, for the incident."""
        number = self._supervisor.status.note_compared(rank, equal, not_proved)
        self._supervisor.log("compared", incident=number, rank=rank, equal=equal, not_proved=not_proved)

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
        self.tell_owners(seat)
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
