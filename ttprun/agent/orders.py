"""What the machine orders, carried out: begin with `Orders.carry_out`."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgpack

from ttprun import recovery
from ttprun.agent.processes import RankHandler, StandbyHandler
from ttprun.agent.verdict import Verdict
from ttprun.errors import ConfigError
from ttprun.protocol import to_rank
from ttprun.protocol.board import LEADER, Field
from ttprun.rank.records.recorder import Recorder, RecordTooLargeError
from ttprun.state.errors import InvalidCheckpointError

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.stored import Stored
    from ttprun.agent.supervisor import Supervisor

logger = logging.getLogger("ttprun")

_KILL_LIMIT_S = 10.0  # a process in uninterruptible sleep may take its time


class Orders:
    """Carries out actions on the ranks that a supervisor looks after."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def carry_out(self, action: recovery.Action) -> None:
        """Carry out one action."""
        match action:
            case recovery.Freeze():
                self.freeze(action)
            case recovery.SpawnRank():
                self.spawn_rank(action)
            case recovery.Replay():
                self._supervisor.repairs.replay(action)
            case recovery.SendState():
                self._supervisor.repairs.send_state(action)
            case recovery.LoadState():
                self.load_state(action)
            case recovery.Resume():
                self._supervisor.repairs.resume(action)
            case recovery.Rewind():
                self.rewind(action)
            case recovery.Persist():
                self._supervisor.repairs.persist(action)
            case recovery.GiveUpCheckpoint(boundary=boundary, reason=reason):
                self._supervisor.checkpoints.give_up(boundary, reason)
            case recovery.NoteUnusable():
                self.note_unusable(action)
            case recovery.SetDeadline(generation=generation, name=name, after_s=after_s, rank=rank):
                self._supervisor.set_deadline(generation, name, after_s, rank)
            case recovery.KillRank():
                self.kill_rank(action)
            case recovery.RecordIncident():
                self.record_incident(action)
            case recovery.RestartGroup(reason=reason):
                self._end_group("restart", reason)
            case recovery.FailJob(reason=reason, has_progress=has_progress):
                self._end_group("fail", reason, has_progress)
            case recovery.FinishJob():
                self._supervisor.conclude(Verdict("done"))
            case _:
                raise TypeError(f"there is no way to carry out {action}")

    def freeze(self, action: recovery.Freeze) -> None:
        """Have the survivors quiesce."""
        self._supervisor.repairs.expect(action.lost)
        survivors = [self._supervisor.seats[rank].local_rank for rank in action.ranks]
        repair_type = self._supervisor.repairs.repair_type()
        order = to_rank.Freeze(action.generation, survivors, list(action.lost), repair_type)
        for rank in action.ranks:
            self._supervisor.seats[rank].tell(order)

    def spawn_rank(self, action: recovery.SpawnRank) -> None:
        """Give a lost rank a process: a standby, or a new one, once the old one has given back what it had.

        A standby that is on its way is waited for: a new process would take as long, and then there would be none left
        for the next fault.
        """
        seat = self._supervisor.seats[action.rank]
        is_on_its_way = self._supervisor.standbys.is_on_its_way
        if is_on_its_way:
            self._supervisor.standbys.hurry()
        if seat.is_dying or is_on_its_way:
            seat.spawn = lambda: self.spawn_rank(action)
            return
        seat.spawn = None
        try:
            handler = self._start(seat.handler.start)
        except OSError as error:
            self._supervisor.log("spawn_failed", rank=seat.rank, reason=str(error))
            event = recovery.SpawnFailed(at_s=time.monotonic(), rank=seat.rank, reason=str(error))
            self._supervisor.advance(event)
            return
        self._supervisor.replace_handler(seat.local_rank, handler)
        seat.sit(handler)
        self._supervisor.watch.welcome(seat, is_replacement=True)

    def _start(self, start: dict[str, Any]) -> RankHandler:
        """Start a process, or take one that stands by. Raises OSError."""
        standby = self._supervisor.standbys.take()
        if standby is None:
            return RankHandler(start, str(self._supervisor.run.path), is_new=False, is_python=True)
        with contextlib.suppress(KeyError, ValueError):
            self._supervisor.selector.unregister(standby.channel.sock)
        standby.channel.sock.setblocking(True)
        return StandbyHandler(start, standby)

    def spawn_those_that_wait(self) -> None:
        """A process is gone, or a standby has become ready, or has died."""
        for spawn in [seat.spawn for seat in self._supervisor.seats if seat.spawn is not None]:
            spawn()

    def recorded(self, seat: Seat, boundary: int) -> dict[str, Any]:
        """A rank's record of a boundary, whoever wrote it; empty if there is none."""
        found = Recorder(seat.record_fd, self._supervisor.config.record_limit_mib << 20).read(boundary)
        fields: dict[str, Any] = (
            {} if found is None else (msgpack.unpackb(found[0], strict_map_key=False, unicode_errors="surrogatepass"))
        )
        return fields

    def lines_since(self, seat: Seat, boundary: int) -> tuple[int, int]:
        """Lines that a rank, alive or lost, has written since its record of the boundary: not to come out again."""
        board, row = self._supervisor.board, seat.local_rank
        out, err = self.recorded(seat, boundary).get("lines", [0, 0])
        return board.get(row, Field.LINES_OUT) - out, board.get(row, Field.LINES_ERR) - err

    def rewind(self, action: recovery.Rewind) -> None:
        """Put what was stored of ranks in the place of what they have recorded since; they have no process now."""
        supervisor = self._supervisor
        if len(action.ranks) == len(supervisor.seats):
            supervisor.board.set(LEADER, Field.SNAPSHOT_AT, 0)
            supervisor.board.set(LEADER, Field.OPEN_AT, 0)
        seat = supervisor.seats[action.ranks[0]]
        try:
            stored = self._stored(action)
            for seat in (supervisor.seats[rank] for rank in action.ranks):
                seat.stored = stored
                self._go_back(seat, stored)
        except (ConfigError, InvalidCheckpointError, RecordTooLargeError, LookupError, ValueError) as error:
            event = recovery.MismatchFound(
                at_s=time.monotonic(),
                rank=seat.rank,
                generation=supervisor.job.generation,
                reason=f"its stored state cannot be used: {error}",
            )
            supervisor.advance(event)

    def _stored(self, action: recovery.Rewind) -> Stored | None:
        """What the ranks go back to; None: they begin anew. Raises if it cannot be used."""
        if not action.boundary:
            return None
        if action.place:
            return self._supervisor.resumption.opened(action.place)
        own = None
        if recovery.is_alone(self._supervisor.job, action.ranks[0]):
            own = self._supervisor.own_states.stored(self._supervisor.seats[action.ranks[0]], action.boundary)
        if own is not None:
            return own
        newest = self._supervisor.snapshots.newest
        if newest is None or newest.boundary != action.boundary:
            raise LookupError(f"there is no snapshot of step {action.boundary} any more")
        return newest.as_stored()

    def note_unusable(self, action: recovery.NoteUnusable) -> None:
        """Keep the next launch from the same failure."""
        self._supervisor.log("checkpoint_unusable", place=action.place, reason=action.reason)
        again = "" if action.is_refused else " this time"
        logger.warning("the run cannot resume from '%s'%s: %s", action.place, again, action.reason)
        self._supervisor.resumption.note_unusable(action.place, action.reason, action.is_refused)

    def _go_back(self, seat: Seat, stored: Stored | None) -> None:
        """Let a seat be as it was at the boundary of a snapshot or checkpoint; of another run's ranks, have no past."""
        board, row = self._supervisor.board, seat.local_rank
        if stored is not None and stored.is_in_recorder:
            seat.go_back_to(stored.boundary)
            board.set(row, Field.RECORDED, stored.boundary)
            board.set(row, Field.APPLIED, stored.boundary)
            board.forget_process(row)
            return
        if stored is None:
            self._supervisor.own_states.forget(seat)
        slot_bytes = self._supervisor.config.record_limit_mib << 20
        os.close(seat.record_fd)
        seat.record_fd = Recorder.create(slot_bytes)
        out, err = 0, 0
        boundary = 0 if stored is None else stored.boundary
        if stored is not None and stored.origin is None:
            part = stored.rank_part(seat.rank)
            Recorder(seat.record_fd, slot_bytes).restore(part)
            before = self.recorded(seat, stored.boundary)["lines"]
            out, err = (known + since for known, since in zip(before, part["lines"], strict=True))
        seat.go_back_to(boundary)
        board.set(row, Field.RECORDED, boundary)
        board.set(row, Field.APPLIED, boundary)
        board.set(row, Field.LINES_OUT, out)
        board.set(row, Field.LINES_ERR, err)
        board.forget_process(row)

    def load_state(self, action: recovery.LoadState) -> None:
        """Tell ranks to load what replicas share."""
        seats = self._supervisor.seats
        if len(action.ranks) == len(seats):
            self._supervisor.comparisons.note_repair(action.ranks, action.boundary)
        for rank in action.ranks:
            stored = seats[rank].stored
            assert stored is not None
            owners = {key: list(ranks) for key, ranks in stored.replicas.parted.items()}
            order = to_rank.LoadState(action.generation, list(stored.files), owners, stored.header_of(rank))
            seats[rank].tell(order)

    def kill_rank(self, action: recovery.KillRank) -> None:
        """End a process whose rank is given to another one.

        It is waited for, since what it has left on the board must not change any more; SIGKILL takes no time.
        """
        seat = self._supervisor.seats[action.rank]
        stack = self._supervisor.lookout.stack_of_late(seat)
        self._supervisor.log("rank_killed", rank=action.rank, pid=seat.pid, reason=action.reason, stack=stack)
        self._supervisor.watch.forget(seat)
        seat.is_lost = True
        seat.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            seat.handler.proc.wait(_KILL_LIMIT_S)
            seat.is_buried = True
        seat.note_leavings(self._supervisor.board)

    def _end_group(self, kind: str, reason: str, has_progress: bool = True) -> None:
        before = self._supervisor.verdict
        if before is not None and (before.kind, kind) != ("restart", "fail"):
            return  # what led here comes first, and explains the rest; but a job that has been ended is not restarted
        if kind == "restart":  # why a job ends is said at its very end, by the launcher
            logger.warning("all ranks start again: %s", reason)
        self._supervisor.log("group_given_up", kind=kind, reason=reason)
        self._supervisor.conclude(Verdict(kind, reason, has_progress))

    def record_incident(self, action: recovery.RecordIncident) -> None:
        """Tell the status, the log and the operator how an incident stands."""
        incident = action.incident
        self._supervisor.status.note_incident(incident)
        not_proved = self._supervisor.status.not_proved_of(incident.id)
        event = asdict(incident) | ({"not_proved": not_proved} if not_proved else {})
        self._supervisor.log("incident" if incident.id else "resume", **event)
        self._supervisor.repairs.note_incident(incident)
        name = f"incident {incident.id}, generation {incident.generation}" if incident.id else "resume"
        if incident.outcome == "open":
            logger.info("%s: %s: %s", name, incident.reason, incident.phase)
            return
        outcome = f"{incident.outcome} in {incident.total_s or 0.0:.2f} s"
        if incident.outcome != "recovered":
            logger.warning("%s: %s", name, outcome)  # the reason is said where the ranks, or the job, are given up
        elif incident.id:
            logger.warning("%s: %s: %s, %d steps lost", name, incident.reason, outcome, incident.steps_lost or 0)
        elif incident.boundary:
            logger.warning("%s: resumed from step %d in %.2f s", name, incident.boundary, incident.total_s or 0.0)
        else:
            logger.warning("%s: no checkpoint can be used: the script starts anew", name)
        if incident.outcome == "recovered":
            self._supervisor.first_failure.forget()
            for seat in self._supervisor.seats:
                seat.journal = {}
                seat.divergence = ""
            self._supervisor.watch.refill_standbys()
