"""Requests: replace healthy ranks, or make the group smaller, or whole again.

A planned replacement is one like any other, whose lost ranks are alive until it begins; ranks that come back are
replaced like lost ones. As no fault has led to it, it counts for none. Whatever speaks against it leaves the job as it
is.
"""

from __future__ import annotations

from dataclasses import replace

from ttprun.protocol.process_orders import KillRank
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Job, JobPhase, name_ranks
from ttprun.recovery.ladder import begin_attempt, why_no_source
from ttprun.recovery.leader_events import DowngradeAsked, ReplacementAsked, UpgradeAsked
from ttprun.recovery.losses import why_not_protected
from ttprun.recovery.members import Life
from ttprun.recovery.phases import Result, open_incident, unchanged
from ttprun.recovery.resize import begin_shrinking, why_not_without


def why_not_replaceable(job: Job, ranks: tuple[int, ...]) -> Reason:
    """Why these ranks cannot give their places to new processes now; "" if they can.

    ranks   at least one
    """
    if job.are_alone:
        return Reason(
            "survivors-disagree",
            "the ranks train without a process group, so a new process could get its state from no rank",
        )
    strangers = tuple(rank for rank in ranks if rank not in job.survivors)
    if job.phase is not JobPhase.RUNNING:
        return Reason(text=f"the job is {job.phase}")
    if strangers or job.finished:
        return Reason("ranks-have-finished", f"{name_ranks(strangers or job.finished)} no longer trains")
    if not {*job.survivors} - {*ranks}:
        return Reason("no-survivor", "no rank would be left to repair the others from")
    remaining = tuple(rank for rank in job.survivors if rank not in ranks)
    return why_not_protected(job) or why_no_source(job, ranks, remaining)


def on_replacement_asked(job: Job, event: ReplacementAsked) -> Result:
    """RUNNING: the ranks are lost from now on."""
    if why_not_replaceable(job, event.ranks):
        return unchanged(job, event)
    kills = tuple(KillRank(rank, event.sentence) for rank in event.ranks)
    given_up = (job.members[rank] for rank in event.ranks)
    job = job.with_members(*(replace(member, pid=None, life=Life.LOST, is_protected=False) for member in given_up))
    job = open_incident(job, event.at_s, event.kind, event.sentence, detect_s=0.0).with_incident(ranks=event.ranks)
    job, actions = begin_attempt(job, event.at_s)
    return job, (*kills, *actions)


def why_not_upgradable(job: Job) -> Reason:
    """Why the ranks that are away cannot come back now; "" if they can."""
    if not job.away:
        return Reason(text="no rank is away")
    if job.phase is not JobPhase.RUNNING:
        return Reason(text=f"the job is {job.phase}")
    if job.finished:
        return Reason("ranks-have-finished", f"{name_ranks(job.finished)} no longer trains")
    return why_not_protected(job, needs_process=False)


def on_upgrade_asked(job: Job, event: UpgradeAsked) -> Result:
    """RUNNING: the ranks that are away get processes, which are repaired like those of lost ranks.

    It is asked for, so that it needs no rung "replace".
    """
    if why_not_upgradable(job):
        return unchanged(job, event)
    ranks = job.away
    fault = f"{name_ranks(ranks)} had to come back ({event.reason})"
    job = job.with_members(*(replace(job.members[rank], life=Life.LOST) for rank in ranks))
    job = open_incident(job, event.at_s, event.kind, fault, detect_s=0.0).with_incident(ranks=ranks)
    return begin_attempt(job, event.at_s)


def on_downgrade_asked(job: Job, event: DowngradeAsked) -> Result:
    """A repair continues without waiting for its replacements any more."""
    if not job.lost or why_not_without(job, job.lost):
        return unchanged(job, event)
    return begin_shrinking(job, event.at_s, Reason(text=event.reason))
