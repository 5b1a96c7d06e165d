"""Requests: replace healthy ranks, make the group smaller, or whole again; and nodes that join or leave.

A planned replacement is one like any other, whose lost ranks are alive until it begins; ranks that come back are
replaced like lost ones. As no fault has led to it, it counts for none. Whatever speaks against it leaves the job as it
is.

If nodes join or leave, the state is saved, and the group starts again on the nodes that are there. Until all ranks have
ended, the job can continue as it is: if the state cannot be saved, or a rank is lost meanwhile, the nodes stay.
`membership_policy.py` decides which nodes there are. Begin with `on_resize_asked`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ttprun.protocol.process_orders import Action, KillRank
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Ending, Job, JobPhase, name_ranks
from ttprun.recovery.job_events import (
    DowngradeAsked,
    GroupResized,
    ReplacementAsked,
    ResizeAsked,
    Saved,
    StatePersisted,
    UpgradeAsked,
)
from ttprun.recovery.job_orders import GiveUpResize
from ttprun.recovery.ladder import begin_attempt, begin_persisting, regroup, why_no_source, why_not_saved
from ttprun.recovery.members import RankState
from ttprun.recovery.on_loss import why_not_protected, with_new_ranks
from ttprun.recovery.phases import Result, enter, open_incident, unchanged
from ttprun.recovery.resize import begin_shrinking, why_not_without
from ttprun.recovery.ways_back import go_back


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
    job = job.with_members(*(replace(member, pid=None, life=RankState.LOST, is_protected=False) for member in given_up))
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
    job = job.with_members(*(replace(job.members[rank], life=RankState.LOST) for rank in ranks))
    job = open_incident(job, event.at_s, event.kind, fault, detect_s=0.0).with_incident(ranks=ranks)
    return begin_attempt(job, event.at_s)


def on_downgrade_asked(job: Job, event: DowngradeAsked) -> Result:
    """A repair continues without waiting for its replacements any more."""
    if not job.lost or why_not_without(job, job.lost):
        return unchanged(job, event)
    return begin_shrinking(job, event.at_s, Reason(text=event.reason))


KIND = "nodes"  # of an incident in which nothing has failed


def on_resize_asked(job: Job, event: ResizeAsked) -> Result:
    """Save the state, unless it cannot be saved now."""
    why_not = why_not_saved(job)
    if why_not:
        return job, (GiveUpResize(str(why_not)),)
    job = open_incident(job, event.at_s, KIND, event.reason, detect_s=0.0).with_incident(rung="resize")
    job = replace(job, ending=Ending(reason=Reason(text=event.reason), is_fault=False, rung="resize", is_resize=True))
    return begin_persisting(job, event.at_s)


def is_resizing(job: Job) -> bool:
    """The state is being saved because nodes join or leave."""
    return job.ending is not None and job.ending.is_resize


def keep_nodes(job: Job, why_not: str) -> tuple[Job, tuple[Action, ...]]:
    """The nodes stay: what waits for the saved state continues as it is."""
    if not is_resizing(job):
        return job, ()
    reason = Reason() if job.incident is None else job.incident.reason
    return replace(job, ending=None).with_incident(
        reason=reason.within(f"{reason}; the nodes stay as they are: {why_not}")
    ), (GiveUpResize(why_not),)


def unless_resizing(handler: Callable[[Job, Any], Result]) -> Callable[[Job, Any], Result]:
    """A handler of faults while the state is being saved; one that has a consequence comes before other nodes."""

    def answer(job: Job, event: Event) -> Result:
        kept, notes = keep_nodes(job, f"{type(event).__name__} while their state was being saved")
        after, actions = handler(kept, event)
        return (job, ()) if after == kept and not actions else (after, (*notes, *actions))

    return answer


def on_saved_to_resize(job: Job, event: StatePersisted, otherwise: Callable[[Job, str], Result]) -> Result:
    """The state is saved, and the group starts again; or it is not, and the nodes stay.

    otherwise   has all resume, given why nothing was saved
    """
    why_not = event.why_not or event.why_unusable
    if not event.place or why_not or job.persists_at is None:
        job, notes = keep_nodes(job, why_not or "nothing was saved")
        job, actions = otherwise(job, why_not or "nothing was saved")
        return job, (*notes, *actions)
    saved = Saved(job.persists_at, event.place)
    reason = Reason() if job.incident is None else job.incident.reason
    return regroup(replace(job, saved=(saved, *job.saved)), event.at_s, saved, reason)


def with_size(job: Job, world_size: int) -> Job:
    """The job with so many ranks, none of which has a process."""
    return with_new_ranks(replace(job, settings=replace(job.settings, world_size=world_size)))


def on_group_resized(job: Job, event: GroupResized) -> Result:
    """All ranks are being started, on other nodes: they resume, as those of a new launch would."""
    if not event.saved:
        job = replace(job, restarts=job.restarts + 1)
        return enter(job, JobPhase.RUNNING, event.at_s, outcome="restarted", rung="restart")
    if job.incident is None:  # another agent has led until now
        job = open_incident(job, event.at_s, KIND, event.reason, detect_s=0.0).with_incident(rung="resize")
    members = job.members.with_each(lambda member: replace(member, life=RankState.LOST, spawn_asked_at_s=event.at_s))
    job = replace(job, members=members, saved=event.saved, replicas=event.replicas, is_growing=event.has_grown)
    assert job.incident is not None
    after, actions = go_back(job, event.at_s, event.saved[0], job.incident.reason)
    if job.incident.kind == KIND:  # nothing has failed: a fault before the next step is the first one to go back for
        after = replace(after, went_back_to=job.went_back_to)
    return after, actions
