"""Ranks that leave with exit code 0 while others still wait for them: the script ends them on purpose.

They are not called back, as they would leave again: the job ends as under torchrun, or starts again if a restart is
left, after the others have saved its state. That others wait is seen by a connection that breaks, by a collective that
nobody else joins, or by all others standing still. Read `end_without_leavers` first.
"""

from __future__ import annotations

from dataclasses import replace

from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.process_orders import Action
from ttprun.protocol.rank_events import RankExited
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Ending, Job, JobPhase, name_ranks
from ttprun.recovery.job_events import ConnectionBroken, DeadlinePassed
from ttprun.recovery.ladder import (
    begin_persisting,
    drain,
    end_job,
    finish_job,
    may_persist,
    take_lower_rung,
    why_no_restart,
)
from ttprun.recovery.members import Member, RankState
from ttprun.recovery.phases import DEADLINE_NAMES, Result, open_incident, unchanged

LEFT = "exit 0"  # kind of the incident
_CONSEQUENCES = ("connection", "checkpoint", LEFT)  # kinds of incidents that a rank's leaving may have opened


def on_broken_by_leaver(job: Job, event: ConnectionBroken) -> Result:
    """RUNNING: a rank waits for one that has left."""
    job = open_incident(job, event.at_s, LEFT, event.sentence, event.detected_after_s)
    return end_without_leavers(job, event.at_s)


def let_others_finish(job: Job, event: RankExited) -> Result:
    """The group is about to be connected again, and a rank has finished without waiting for that."""
    has_resumed = job.phase is JobPhase.RESUMING
    job = mark_finished(job, event)
    if has_resumed:  # they stood still, and have been ordered to go on since
        job = replace(job, members=job.members.with_each(Member.with_answers_forgotten))
    if job.incident is None and job.survivors:
        fault = f"rank {event.rank} finished while all waited for a checkpoint"
        job = open_incident(job, event.at_s, LEFT, fault, detect_s=0.0)
    why = f"rank {event.rank} has finished, and the group cannot be built again without it"
    job, actions = drain(job, event.at_s, Reason("ranks-have-finished", why))
    return end_standstill(job, event.at_s, actions) if job.phase is JobPhase.DRAINING else (job, actions)


def mark_finished(job: Job, event: RankExited) -> Job:
    """The rank's script has reached its end."""
    return job.with_member(event.rank, pid=None, life=RankState.FINISHED)


def on_frozen_while_draining(job: Job, event: RankFrozen) -> Result:
    """A rank stands still; if all do, and some not at the script's end, nobody will finish any more."""
    member = job.members[event.rank]
    if member.life is not RankState.LIVE or member.frozen is not None:
        return unchanged(job, event)
    return end_standstill(job.with_member(event.rank, frozen=event), event.at_s)


def on_broken_while_draining(job: Job, event: ConnectionBroken) -> Result:
    """A rank waits in a collective that will never complete."""
    return end_drain_early(job, event.at_s, Reason(text=event.sentence))


def end_standstill(job: Job, at_s: float, actions: tuple[Action, ...] = ()) -> Result:
    """End the drain if all ranks that are left stand still, and some wait for others."""
    live = [job.members[rank] for rank in job.survivors]
    if any(member.frozen is None for member in live):
        return job, actions
    waiting = tuple(member.rank for member in live if member.frozen is not None and not member.frozen.is_at_end)
    if not waiting:
        return job, actions
    after, more = end_drain_early(
        job, at_s, Reason("ranks-have-finished", f"{name_ranks(waiting)} cannot finish without the others")
    )
    return after, (*actions, *more)


def end_drain_early(job: Job, at_s: float, why: Reason) -> Result:
    """Ranks are left that will not finish."""
    return take_lower_rung(job, at_s, why) if job.lost else end_without_leavers(job, at_s)


def end_drain(job: Job, at_s: float) -> Result:
    """The last rank that could finish is gone."""
    why = f"{name_ranks(job.lost)} did not finish, and no other rank is running any more"
    return take_lower_rung(job, at_s, Reason("ranks-have-finished", why)) if job.lost else finish_job(job, at_s)


def on_drain_deadline(job: Job, event: DeadlinePassed) -> Result:
    """The ranks that have not finished in time wait for a rank that is not there: restart the group, or end."""
    if event.name != DEADLINE_NAMES[JobPhase.DRAINING]:
        return unchanged(job, event)
    waited_s = event.at_s - job.phase_since_s
    return end_drain_early(
        job, event.at_s, Reason(text=f"{name_ranks(job.survivors)} did not finish within {waited_s:.0f} s")
    )


def end_without_leavers(job: Job, at_s: float) -> Result:
    """The others write the job's state, and then all ends, or starts again from the script's top."""
    leavers = job.finished
    assert job.incident is not None
    fault = f"{name_ranks(leavers)} left with exit code 0 while {name_ranks(job.survivors)} still needed it"
    if len(leavers) > 1:
        fault = fault.removesuffix("it") + "them"
    if job.incident.kind not in _CONSEQUENCES:
        fault = f"{fault}; {job.cause}"
    gone = (job.members[rank] for rank in leavers)
    job = job.with_members(
        *(replace(member, life=RankState.LOST, is_rerun=False, is_protected=False) for member in gone)
    )
    job = replace(job, cause=fault).with_incident(kind=LEFT, ranks=leavers, reason=Reason(text=fault))
    why_not = why_no_restart(job)
    ending = Ending(
        reason=Reason(text=fault),
        rung="fail" if why_not else "restart",
        is_restart=not why_not,
        why=Reason(text=fault),
    )
    job = replace(job, ending=ending)
    return begin_persisting(job, at_s) if may_persist(job) else end_job(job, at_s)
