"""Planned replacement: healthy ranks give their places to new processes, since somebody knows that they will not last.

It is a replacement like any other, whose lost ranks are alive until it begins; as no fault has led to it, it counts for
none. Whatever speaks against it leaves the job as it is.
"""

from __future__ import annotations

from dataclasses import replace

from ttprun.recovery.actions import KillRank
from ttprun.recovery.events import ReplacementAsked
from ttprun.recovery.faults import why_not_protected
from ttprun.recovery.job import Job, Life, Phase, name_ranks
from ttprun.recovery.ladder import Result, begin_attempt, open_incident, unchanged


def why_not_replaceable(job: Job, ranks: tuple[int, ...]) -> str:
    """Why these ranks cannot give their places to new processes now; "" if they can.

    ranks   at least one
    """
    strangers = tuple(rank for rank in ranks if rank not in job.survivors)
    if job.phase is not Phase.RUNNING:
        return f"the job is {job.phase}"
    if strangers or job.finished:
        return f"{name_ranks(strangers or job.finished)} trains no more"
    if not {*job.survivors} - {*ranks}:
        return "no rank would be left to repair the others from"
    return why_not_protected(job, ranks[0])


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
