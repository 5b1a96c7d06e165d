"""The ways back: all ranks, or one that is alone, resume from a snapshot, a checkpoint or the script's top.

Begin with `go_back`.
"""

from __future__ import annotations

from dataclasses import replace

from ttprun.protocol.process_orders import KillRank, Rewind, SpawnRank
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import NOBODY, FaultIdentity, Job, JobPhase
from ttprun.recovery.job_events import Saved
from ttprun.recovery.members import RankState
from ttprun.recovery.phases import UNDONE, Result, deadline_of, enter


def may_rewind(job: Job) -> bool:
    """Whether all ranks can rewind to a snapshot."""
    if job.snapshot is None or job.unprotected_reason or job.finished:
        return False
    is_free = job.settings.is_alone and job.snapshot >= steps_reached(job)
    return ("replace" if is_free else "rewind") in job.settings.rungs


def go_back(job: Job, at_s: float, to: Saved, why: Reason) -> Result:
    """All ranks resume from a stored state; with boundary 0 they start from the top.

    why   for the operator
    """
    job = replace(job.with_incident(reason=why), rewind_to=to.boundary, rewind_place=to.place, ending=None)
    if to.place or not to.boundary:  # the reason held for the old processes
        job = replace(job, unprotected_reason=Reason())
    if to.place and not job.is_resumed:
        job = replace(job, went_back_to=to.boundary)
    return begin_rewind(job, at_s)


def why_no_rewind(job: Job) -> Reason:
    """Why another rewind to the snapshot would not help; "" if it may."""
    cause = what_sends_back(job)
    times = job.rewinds.count(cause)
    if times < job.settings.max_rewinds:
        return Reason()
    return Reason(
        "same-fault-again",
        f"all ranks went back to step {job.snapshot} {times} times, and the same fault comes back ({cause.kind})",
    )


def what_sends_back(job: Job) -> FaultIdentity:
    """The kind of the open incident, with the boundary of its newest fault, or else of the snapshot."""
    kind = "" if job.incident is None else job.incident.kind
    places = [past.boundary for past in job.faults if past.kind == kind]
    return FaultIdentity(rank=NOBODY, kind=kind, boundary=places[-1] if places else job.snapshot or 0)


def begin_rewind(job: Job, at_s: float) -> Result:
    """Rung "rewind": every rank gets a new process, which replays up to the stored boundary.

    Rung "restart" if that is a checkpoint that this job has saved because nothing else was possible; "replace" if a
    rank that is alone returns to its newest step.
    """
    boundary = job.rewind_to
    assert boundary is not None
    job = replace(job, generation=job.generation + 1)
    is_alone = job.settings.is_alone
    where = f"all ranks go back to step {boundary}" if boundary else "all ranks start anew"
    if is_alone:
        where = f"it goes back to step {boundary}" if boundary else "it starts anew"
    present = [member for member in job.members if not is_alone or member.life is not RankState.AWAY]
    kills = tuple(KillRank(member.rank, where) for member in present if member.pid is not None)
    unasked = [member.rank for member in present if member.pid is not None or member.spawn_asked_at_s is None]
    job = job.with_members(*(member.as_lost(at_s) for member in present))
    job = replace(job, persists_at=None)
    spawns = (SpawnRank(rank, job.generation) for rank in unasked)
    ranks = tuple(member.rank for member in present)
    actions = (*kills, Rewind(ranks, boundary, job.rewind_place), *spawns, deadline_of(job, JobPhase.REPLAYING))
    rung = "restart" if job.rewind_place and not job.is_resumed else "rewind"
    if rung == "restart" and job.incident is not None and job.incident.rung == "resize":
        rung = "resize"
    if is_alone and not job.rewind_place and boundary >= steps_reached(job):
        rung = "replace"
    return enter(job, JobPhase.REPLAYING, at_s, actions, rung=rung, **UNDONE | {"boundary": boundary})


def steps_reached(job: Job) -> int:
    """Optimizer steps that lost ranks had completed when the fault came, as far as it is known."""
    reached = [fault.boundary for fault in job.faults] if job.stood_at is None else [job.stood_at]
    return max(reached, default=0)
