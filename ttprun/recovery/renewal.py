"""Handlers for a new supervisor in the place of one that has failed.

The job itself is whole: it is what the recorded events come to. But of the orders that the newest event has led to,
some may not have been carried out. So what was going on is ordered again, as a new attempt; in RUNNING that is nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ttprun.protocol.reason import Reason
from ttprun.recovery.hung import try_again
from ttprun.recovery.job import Job, JobPhase
from ttprun.recovery.ladder import begin_persisting
from ttprun.recovery.leader_events import SupervisorRenewed
from ttprun.recovery.leader_orders import FailJob, FinishJob, RestartGroup
from ttprun.recovery.members import Member
from ttprun.recovery.phases import Result, deadline_of, enter


def on_renewed_in_repair(job: Job, event: SupervisorRenewed) -> Result:
    """Another attempt, if one is left: with new processes where those that were requested have not been seen."""
    job = with_spawns_forgotten(job)
    if job.ending is not None:  # all have resumed only to end by themselves
        return begin_persisting(job, event.at_s)
    return try_again(job, event.at_s, reason_of(event), "repair the job")


def with_spawns_forgotten(job: Job) -> Job:
    """The job without the requests for processes that have not come yet."""

    def change(member: Member) -> Member:
        is_waiting = member.pid is None and member.spawn_asked_at_s is not None
        return replace(member, spawn_asked_at_s=None) if is_waiting else member

    return replace(job, members=job.members.with_each(change))


def reason_of(event: SupervisorRenewed) -> Reason:
    """What has failed, for the operator."""
    return Reason("ttprun-error", f"ttprun's supervisor failed and was made anew ({event.reason})")


def on_renewed_while_persisting(job: Job, event: SupervisorRenewed) -> Result:
    """All quiesce again, and write."""
    return begin_persisting(job, event.at_s)


def on_renewed_while_draining(job: Job, event: SupervisorRenewed) -> Result:
    """The deadline for ranks that may finish begins again."""
    return enter(job, JobPhase.DRAINING, event.at_s, (deadline_of(job, JobPhase.DRAINING),))


def on_renewed_while_restarting(job: Job, event: SupervisorRenewed) -> Result:
    """The group is to be restarted, which the agent may not have heard."""
    return job, (RestartGroup(job.incident.reason if job.incident is not None else reason_of(event)),)


def on_renewed_when_done(job: Job, event: SupervisorRenewed) -> Result:
    """All scripts have reached their end, which the agent may not have heard."""
    return job, (FinishJob(),)


def on_renewed_when_failed(job: Job, event: SupervisorRenewed) -> Result:
    """The job has failed, which the agent may not have heard."""
    why = job.ending.reason if job.ending is not None else reason_of(event)
    return job, (FailJob(why),)
