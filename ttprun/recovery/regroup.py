"""Handlers for nodes that join or leave: the state is saved, and the group starts again on the nodes that are there.

Until all ranks have ended, the job can continue as it is: if the state cannot be saved, or a rank is lost meanwhile,
the nodes stay. Which nodes there are is decided elsewhere (`membership_policy.py`). Begin with `on_resize_asked`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ttprun.protocol.process_orders import Action
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Ending, Job, JobPhase
from ttprun.recovery.ladder import begin_persisting, regroup, why_not_saved
from ttprun.recovery.leader_events import GroupResized, ResizeAsked, Saved, StatePersisted
from ttprun.recovery.leader_orders import GiveUpResize
from ttprun.recovery.losses import with_new_ranks
from ttprun.recovery.members import Life
from ttprun.recovery.phases import Result, enter, open_incident
from ttprun.recovery.ways_back import go_back

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
    members = job.members.with_each(lambda member: replace(member, life=Life.LOST, spawn_asked_at_s=event.at_s))
    job = replace(job, members=members, saved=event.saved, replicas=event.replicas, is_growing=event.has_grown)
    assert job.incident is not None
    after, actions = go_back(job, event.at_s, event.saved[0], job.incident.reason)
    if job.incident.kind == KIND:  # nothing has failed: a fault before the next step is the first one to go back for
        after = replace(after, went_back_to=job.went_back_to)
    return after, actions
