"""The ways out of an incident: another attempt to replace or reconnect, back to a snapshot, restart, draining, the end.

Each takes the job as it is, decides nothing, and returns the job in its new phase with the actions that bring it there.
Every way down has a reason for the operator: why it is taken, and what it began with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttprun.recovery.actions import (
    Action,
    FailJob,
    FinishJob,
    Freeze,
    KillRank,
    RecordIncident,
    RestartGroup,
    Rewind,
    SetDeadline,
    SpawnRank,
)
from ttprun.recovery.events import Event
from ttprun.recovery.incident import Incident
from ttprun.recovery.job import WINDOW_S, Ending, Job, Life, Member, Opening, Phase, name_ranks

Result = tuple[Job, tuple[Action, ...]]

DEADLINE_NAMES = {
    Phase.FREEZING: "freeze",
    Phase.REPLAYING: "replay",
    Phase.TRANSFERRING: "transfer",
    Phase.RESUMING: "resume",
    Phase.PERSISTING: "persist",
    Phase.DRAINING: "drain",
}
HALT = "halt"  # the deadline for standing still, with which PERSISTING begins
# What an attempt has measured, and the next one measures anew.
UNDONE = dict.fromkeys(("boundary", "freeze_s", "replay_s", "transfer_s", "rebuild_s", "reissue_s"))


def open_incident(job: Job, at_s: float, kind: str, fault: str, detect_s: float) -> Job:
    """The job with a new incident, in which no rank is lost yet.

    fault   a sentence that goes on from "it began when"
    """
    incident = Incident(
        id=job.incident_count + 1,
        kind=kind,
        ranks=(),
        rung="replace",
        outcome="open",
        reason=fault,
        phase=job.phase,
        generation=job.generation,
        opened_at_s=at_s,
        detect_s=detect_s,
    )
    recent = (opening for opening in job.openings if opening.at_s > at_s - WINDOW_S)
    openings = (*recent, Opening(at_s=at_s, kind=kind))
    return replace(job, incident=incident, incident_count=incident.id, openings=openings)


def enter(job: Job, phase: Phase, at_s: float, actions: tuple[Action, ...] = (), **incident_changes: Any) -> Result:
    """Begin a phase; the open incident is recorded as it then stands, and closed if its outcome is no longer open."""
    job = replace(job, phase=phase, phase_since_s=at_s)
    if job.incident is None:
        return job, actions
    incident = replace(job.incident, phase=phase, generation=job.generation, **incident_changes)
    if incident.outcome == "open":
        return replace(job, incident=incident), (*actions, RecordIncident(incident))
    incident = replace(incident, total_s=(incident.detect_s or 0.0) + at_s - incident.opened_at_s)
    return replace(job, incident=None), (*actions, RecordIncident(incident))


def deadline_of(job: Job, phase: Phase, extra_s: float = 0.0) -> SetDeadline:
    """The deadline with which a phase begins."""
    name = DEADLINE_NAMES[phase]
    limit_s: float = getattr(job.settings.limits, f"{name}_s")
    return SetDeadline(job.generation, name, limit_s + extra_s)


def begin_attempt(job: Job, at_s: float) -> Result:
    """Rung "replace": a new generation; survivors freeze, and each lost rank gets a process.

    If every lost rank still has its own process it is rung "rerun", and nothing is spawned. If no rank is lost it is
    rung "reconnect": the survivors freeze, and connect anew. If ranks that were away come back it is rung "resize".

    A process that was started for a replacement and has had no orders yet is kept, as is one that is being started. One
    that has had orders is exchanged: it may stand anywhere between the top of the script and the boundary. If nobody is
    left on the way back to a snapshot, all go back once more.

    If a lost rank held what no other one does, its place cannot be taken: all go back.
    """
    is_irreplaceable = bool(job.unreplicated_reason and job.lost)
    if job.rewind_to is not None and (is_irreplaceable or not job.survivors):
        return begin_rewind(job, at_s)
    if is_irreplaceable:
        return restart_group(job, at_s, job.unreplicated_reason)
    job = replace(job, generation=job.generation + 1)
    spawns: list[Action] = []
    members: list[Member] = []
    for member in job.members:
        if member.needs_process and member.pid is not None:
            spawns.append(KillRank(member.rank, f"the repair begins again as generation {job.generation}"))
            member = replace(member, pid=None, is_rerun=False, is_protected=False)
        if member.life is Life.LOST and member.pid is None and member.spawn_asked_at_s is None:
            spawns.append(SpawnRank(member.rank, job.generation))
            member = replace(member, spawn_asked_at_s=at_s)
        members.append(member.with_answers_forgotten())
    job = replace(job, members=tuple(members))
    freeze = Freeze(job.survivors, job.generation, job.lost)
    actions = (freeze, *spawns, deadline_of(job, Phase.FREEZING))
    job = replace(job, rewind_to=None)
    rung = "replace" if any(not member.is_rerun for member in job.replacements) else "rerun"
    rung = "resize" if job.is_upgrading else rung if job.lost else "reconnect"
    return enter(job, Phase.FREEZING, at_s, actions, rung=rung, **UNDONE)


def drain(job: Job, at_s: float, why: str) -> Result:
    """No repair is possible, but ranks still run: those that do not need the lost ones may finish before the restart.

    Ranks that do need them wait in a collective that will never complete, hence the deadline.
    """
    if not job.survivors:
        return restart_group(job, at_s, why) if job.lost else finish_job(job, at_s)
    reason = reason_of(job, why)
    useless = tuple(member for member in job.replacements if member.pid is not None)
    job = job.with_members(*(replace(member, pid=None, is_rerun=False, is_protected=False) for member in useless))
    kills = (KillRank(member.rank, "it is no longer needed: " + why) for member in useless)
    actions = (*kills, deadline_of(job, Phase.DRAINING))
    return enter(job, Phase.DRAINING, at_s, actions, rung="restart", reason=reason)


def restart_group(job: Job, at_s: float, why: str) -> Result:
    """Rung "rewind" if there is a snapshot, else "restart": the agent restarts the whole group; else the job ends.

    If a restarted script begins with what the ranks save, they save it first. Whoever has switched both off wants the
    scheduler to start the job again, or nobody.
    """
    if job.incident is None:
        job = open_incident(job, at_s, "checkpoint", "all stood still for a checkpoint", detect_s=0.0)
    if job.is_resumed:
        why = f"the run cannot go on from the checkpoint of step {job.rewind_to}: {why}; --resume off begins anew"
        return fail_job(job, at_s, why, has_progress=False, rung="fail")
    if job.rewind_to is not None:
        why = f"going back to the snapshot of step {job.rewind_to} failed: {why}"
        job = replace(job, rewind_to=None, snapshot=None)
    elif may_rewind(job):
        return begin_rewind(job.with_incident(reason=reason_of(job, why)), at_s)
    if "restart" not in job.settings.rungs:
        return fail_job(job, at_s, f"{why}; restarting the group is switched off (rungs)", rung="fail")
    if job.settings.max_restarts is not None and job.restarts >= job.settings.max_restarts:
        return fail_job(job, at_s, f"{why}; no restart is left (--max-restarts)", rung="restart")
    ending = Ending(reason=reason_of(job, why), rung="restart", is_restart=True)
    job = replace(job, ending=ending)
    return begin_persisting(job, at_s) if job.settings.saves_before_restart and may_persist(job) else end_job(job, at_s)


def may_rewind(job: Job) -> bool:
    """Whether all ranks can go back to a snapshot."""
    is_possible = job.snapshot is not None and not job.unprotected_reason and not job.finished
    return is_possible and "rewind" in job.settings.rungs


def begin_rewind(job: Job, at_s: float) -> Result:
    """Rung "rewind": every rank gets a new process, which replays up to the boundary of the snapshot."""
    boundary = job.snapshot if job.rewind_to is None else job.rewind_to
    assert boundary is not None
    job = replace(job, generation=job.generation + 1, rewind_to=boundary)
    kills = tuple(
        KillRank(member.rank, f"all ranks go back to step {boundary}")
        for member in job.members
        if member.pid is not None
    )
    unasked = [member.rank for member in job.members if member.pid is not None or member.spawn_asked_at_s is None]
    fresh = (Member(rank=rank, life=Life.LOST, spawn_asked_at_s=at_s) for rank in range(len(job.members)))
    job = replace(job, members=tuple(fresh))
    spawns = (SpawnRank(rank, job.generation) for rank in unasked)
    actions = (*kills, Rewind(boundary), *spawns, deadline_of(job, Phase.REPLAYING))
    return enter(job, Phase.REPLAYING, at_s, actions, rung="rewind", **UNDONE | {"boundary": boundary})


def finish_job(job: Job, at_s: float) -> Result:
    """All scripts have come to their end."""
    return enter(job, Phase.DONE, at_s, (FinishJob(),), outcome="recovered", steps_lost=0)


def fail_job(
    job: Job, at_s: float, why: str, has_progress: bool = True, rung: str = "", is_fault: bool = True
) -> Result:
    """Nothing is left to try, or nothing should be: the job ends, after its state has been written if that is possible.

    rung       of the open incident, "" to leave it
    is_fault   False: it ends because somebody has asked
    """
    ending = Ending(reason=reason_of(job, why), has_progress=has_progress, is_fault=is_fault, rung=rung)
    job = replace(job, ending=ending)
    return begin_persisting(job, at_s) if may_persist(job) else end_job(job, at_s)


def end_job(job: Job, at_s: float) -> Result:
    """The job, or its present group of ranks, ends as `job.ending` says."""
    ending = job.ending
    assert ending is not None
    if ending.is_restart:
        actions = (RestartGroup(ending.reason),)
        return enter(replace(job, ending=None), Phase.RESTARTING, at_s, actions, rung="restart", reason=ending.reason)
    order = FailJob(ending.reason, ending.has_progress)
    changes = {"rung": ending.rung} if ending.rung else {}
    return enter(job, Phase.FAILED, at_s, (order,), outcome="failed", reason=ending.reason, **changes)


def may_persist(job: Job) -> bool:
    """Whether living ranks hold a state that a later launch can go on from."""
    return not why_not_saved(job)


def why_not_saved(job: Job) -> str:
    """Why the ranks cannot be made to write a checkpoint now; "" if they can."""
    if job.phase in (Phase.PERSISTING, Phase.RESTARTING, Phase.DONE, Phase.FAILED):
        return f"the job is {job.phase}"
    if "persist" not in job.settings.rungs:
        return "saving is switched off (rungs)"
    if job.unprotected_reason:
        return job.unprotected_reason
    if job.finished or not job.survivors:
        return f"{name_ranks(job.finished or job.lost)} trains no more"
    silent = tuple(rank for rank in job.survivors if not job.members[rank].is_protected)
    return f"the hooks of {name_ranks(silent)} have not said hello yet" if silent else ""


def begin_persisting(job: Job, at_s: float) -> Result:
    """Rung "persist": the living ranks stand still, and then write what they hold.

    If the job goes on afterwards no rank is lost; if it ends, the places of lost ranks are not taken any more.
    """
    job = replace(job, generation=job.generation + 1, persists_at=None, rewind_to=None)
    useless = tuple(member for member in job.replacements if member.pid is not None)
    job = job.with_members(*(replace(member, pid=None, is_rerun=False, is_protected=False) for member in useless))
    job = replace(job, members=tuple(member.with_answers_forgotten() for member in job.members))
    kills = (KillRank(member.rank, "the job ends, and it has not caught up") for member in useless)
    freeze = Freeze(job.survivors, job.generation, job.lost)
    deadline = SetDeadline(job.generation, HALT, job.settings.limits.halt_s)
    return enter(job, Phase.PERSISTING, at_s, (freeze, *kills, deadline))


def reason_of(job: Job, why: str) -> str:
    """Why a rung is left, then why the one before it was, back to what the incident began with."""
    if job.incident is None:
        return why
    if job.incident.rung in ("reconnect", "rerun", "replace", "rewind"):
        return f"{why}; it began when {job.incident.reason}"
    return f"{why}; {job.incident.reason}"


def unchanged(job: Job, event: Event) -> Result:
    """The event needs no answer; its row says why."""
    return job, ()
