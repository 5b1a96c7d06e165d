"""Publishes how the run stands: `status.json`, written when something has changed and every half second."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ttprun.agent.not_proved import NotProved
from ttprun.config import Config
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import (
    IncidentStatus,
    RankStatus,
    ResumeStatus,
    RunState,
    RunStatus,
    read_status,
    write_status,
)
from ttprun.protocol.board import FINISHED, Field, Phase
from ttprun.recovery import Incident, Job, cost_of_a_loss, cost_of_a_loss_alone, is_elastic
from ttprun.recovery import Phase as JobPhase
from ttprun.recovery.job import name_ranks
from ttprun.recovery.replicas import in_short

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor

_EVERY_S = 0.5
_STATES: dict[JobPhase, RunState] = {
    JobPhase.RUNNING: "healthy",
    JobPhase.PERSISTING: "healthy",
    JobPhase.RESTARTING: "restarting",
    JobPhase.DONE: "done",
    JobPhase.FAILED: "failed",
}


class StatusPublisher:
    """Keeps the incidents, and writes the status."""

    def __init__(self, run: RunDirectory, config: Config, world_size: int) -> None:
        self._run = run
        self._run_id = config.run_id or run.path.name
        self._world_size = world_size
        self._started_at = timestamp()
        self._incidents: dict[int, Incident] = {}
        self._compared: dict[int, tuple[list[str], list[str]]] = {}  # incident -> what was equal, what is not proved
        self._resume: ResumeStatus | None = None
        self._written_s = 0.0
        self._seen: tuple[object, ...] = ()
        self.restarts_left = 0
        self.not_proved = NotProved()

    def note_incident(self, incident: Incident) -> None:
        """An incident was opened, has gone on, or has ended; or it is none, and the run goes on from a checkpoint."""
        if incident.id:
            self._incidents[incident.id] = incident
        if not incident.id or (self._resume is not None and self._resume.outcome == "open"):
            told = ResumeStatus(incident.boundary, incident.outcome, incident.reason, incident.total_s)
            self._resume = told
        self.not_proved.note_incident(incident)

    def note_compared(self, rank: int, equal: Sequence[str], not_proved: Sequence[str]) -> int | None:
        """A rank was compared with the one whose place it takes; returns the incident, None if it is in none."""
        found = next((one for one in reversed(self._incidents.values()) if rank in one.ranks), None)
        if found is None:
            return None
        compared = self._compared.setdefault(found.id, ([], []))
        for known, told in zip(compared, (equal, not_proved), strict=True):
            known += [one for one in (f"rank {rank}: {text}" for text in told) if one not in known]
        self._seen = ()
        return found.id

    def not_proved_of(self, number: int) -> tuple[str, ...]:
        """What of an incident is not proved: objects that are in no record, and what could not be compared."""
        _, uncompared = self._compared.get(number, ((), ()))
        return (*self.not_proved.of_incident(number), *uncompared)

    def publish(self, supervisor: Supervisor) -> None:
        """Write the status if something has changed, or if half a second has passed."""
        job = supervisor.job
        seen = (job.phase, job.generation, len(self._incidents), tuple(seat.pid for seat in supervisor.seats))
        if seen == self._seen and time.monotonic() - self._written_s < _EVERY_S:
            return
        self._seen = seen
        self._written_s = time.monotonic()
        state = _STATES.get(job.phase, "recovering")
        if state == "healthy" and not any(seat.is_present for seat in supervisor.seats):
            state = "starting"
        write_status(self._run.status, self._compose(supervisor, state))

    def end(self, supervisor: Supervisor, exit_code: int, reason: str) -> None:
        """Write the last status of the run."""
        state: RunState = "done" if exit_code == 0 else "failed"
        status = self._compose(supervisor, state, exit_code, reason)
        write_status(self._run.status, status)

    def _compose(
        self, supervisor: Supervisor, state: RunState, exit_code: int | None = None, reason: str = ""
    ) -> RunStatus:
        job = supervisor.job
        return RunStatus(
            run_id=self._run_id,
            state=state,
            generation=job.generation,
            world_size=self._world_size,
            agent_pid=os.getpid(),
            started_at=self._started_at,
            updated_at=timestamp(),
            restarts_left=self.restarts_left,
            standbys=supervisor.standbys.ready,
            standby_state=supervisor.standbys.state if exit_code is None else "",
            protection=protection_of(job, [seat.rank for seat in supervisor.seats if not is_seen(supervisor, seat)]),
            exit_code=exit_code,
            reason=reason or (supervisor.verdict.reason if supervisor.verdict else ""),
            ranks=tuple(self._rank(supervisor, seat, exit_code is not None) for seat in supervisor.seats),
            incidents=tuple(map(self._incident, self._incidents.values())),
            checkpoint=supervisor.checkpoints.status,
            resume=self._resume,
            snapshot_step=supervisor.snapshots.newest.boundary if supervisor.snapshots.newest is not None else None,
            save_dir=supervisor.config.save_dir,
            away=job.away,
            not_proved=self.not_proved.names,
        )

    def _incident(self, incident: Incident) -> IncidentStatus:
        known = {name: getattr(incident, name) for name in _INCIDENT_FIELDS}
        equal, _ = self._compared.get(incident.id, ((), ()))
        return IncidentStatus(**known, equal=tuple(equal), not_proved=self.not_proved_of(incident.id))

    def _rank(self, supervisor: Supervisor, seat: Seat, has_ended: bool) -> RankStatus:
        row = supervisor.board_row(seat)
        phase = Phase(row[Field.PHASE])
        is_away = seat.rank in supervisor.job.away
        if seat.is_finished:
            state = "finished"
        elif is_away:
            state = "away"
        elif seat.is_lost or has_ended:
            state = "lost"
        elif not seat.is_present:
            state = "starting"
        else:
            state = {Phase.REPLAYING: "replaying", Phase.REPAIRING: "repairing"}.get(phase, "running")
        step = row[Field.APPLIED]
        seen_s = (time.monotonic_ns() - row[Field.SEEN_NS]) / 1e9 if row[Field.SEEN_NS] else None
        return RankStatus(
            rank=seat.rank,
            local_rank=seat.local_rank,
            pid=None if is_away else seat.pid or None,
            state=state,
            step=step if step < FINISHED else None,
            phase=None if is_away else phase.name.lower(),
            last_seen_s=seen_s,
            protection=_protection_of_rank(supervisor, seat),
        )


def is_seen(supervisor: Supervisor, seat: Seat) -> bool:
    """Whether a rank's hooks have been heard in its present process, and it has passed a step under them."""
    row = supervisor.board_row(seat)
    is_on_its_way = Phase(row[Field.PHASE]) in (Phase.REPLAYING, Phase.REPAIRING)
    return seat.is_protected and row[Field.APPLIED] > 0 and not is_on_its_way


def _protection_of_rank(supervisor: Supervisor, seat: Seat) -> str:
    job = supervisor.job
    own = job.alone.get(seat.rank)
    if own is not None and own.unprotected_reason:
        return "off"
    is_hindered = any(member.hindrance for member in job.members if member.rank == seat.rank)
    if job.unprotected_reason or is_hindered or job.settings.rungs.isdisjoint(("replace", "rerun", "resize")):
        return "off"
    return "on" if is_seen(supervisor, seat) else "not yet"


def protection_of(job: Job, unseen: Sequence[int]) -> str:
    """ "on", or why a lost rank cannot be replaced, or cannot yet.

    unseen   ranks that have not passed a step under their hooks
    """
    if "replace" not in job.settings.rungs and is_elastic(job) and not job.unprotected_reason:
        return "off: a lost rank leaves with its replica, and the others continue"
    if "replace" not in job.settings.rungs:
        return "off: a lost rank restarts the whole group"
    if job.unreplicated_reason and not job.unprotected_reason:
        return f"on, but all ranks go back to the newest snapshot: {job.unreplicated_reason}"
    if job.replicas.has_single_holders and not job.unprotected_reason:
        names = in_short(job.replicas.all_names)
        return f"on, but all ranks go back to the newest snapshot: no other rank holds a rank's own {names}"
    if job.are_alone and not job.unprotected_reason:
        return _protection_of_alone(job)
    hindered = [member for member in job.members if member.hindrance]
    if hindered and not job.unprotected_reason:
        ranks = name_ranks(tuple(member.rank for member in hindered))
        return f"off: {ranks} could not be replaced now: {job.hindrance}; if one is lost, {cost_of_a_loss(job)}"
    if not job.unprotected_reason and (waited_for := [rank for rank in unseen if rank not in job.away]):
        return f"not yet: ttprun has not seen an optimizer step of {name_ranks(tuple(waited_for))}"
    return f"off: {job.unprotected_reason}; if one is lost, {cost_of_a_loss(job)}" if job.unprotected_reason else "on"


def _protection_of_alone(job: Job) -> str:
    """ "on", or why a lost rank of those that train each for itself begins anew."""
    for member in job.members:
        own = job.alone.get(member.rank)
        why_not = member.hindrance or ("" if own is None else own.unprotected_reason)
        if why_not:
            cost = cost_of_a_loss_alone(job, member.rank, None)
            return f"off: rank {member.rank} cannot be repaired ({why_not}); if it is lost, {cost}"
    return "on"


def write_last_status(run: RunDirectory, exit_code: int, reason: str) -> None:
    """End the status of a run that had no supervisor."""
    status = read_status(run.status)
    state: RunState = "done" if exit_code == 0 else "failed"
    write_status(run.status, replace(status, state=state, exit_code=exit_code, reason=reason, updated_at=timestamp()))


_INCIDENT_FIELDS = {field.name for field in fields(IncidentStatus)} & {field.name for field in fields(Incident)}
