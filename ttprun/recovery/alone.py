"""Ranks that train without a process group, each for itself: a fault of one does not concern the others.

Each of them is a job of its own (`Job.alone`), in which all other ranks are away; the same machine decides for it. It
resumes from its own state of the newest step, else from an older one, else it starts again. The others are not stopped.
The whole job's generation counts connections and does not change; that of the rank's own job counts its attempts. What
the rank's own job cannot do (a restart, the end) is done to all.

As soon as a rank makes a process group with others, its faults concern them too. Begin with `domain_of`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from msgspec import structs

from ttprun.protocol.from_rank import RankJoined, RankTrainsAlone
from ttprun.protocol.meeting import GroupMembership
from ttprun.protocol.process_orders import Action, SpawnRank
from ttprun.protocol.rank_events import Event, RankEvent, RepairEvent
from ttprun.protocol.to_rank import LoadState, Replay, Resume
from ttprun.recovery.job import Job, JobPhase
from ttprun.recovery.job_events import DeadlinePassed, SnapshotTaken, SupervisorRenewed
from ttprun.recovery.members import Member, Members, RankState
from ttprun.recovery.phases import FailJob, FinishJob, RecordIncident, RestartGroup, Result, SetDeadline

_AT_REST = (JobPhase.RUNNING, JobPhase.DONE)
_RUNGS = frozenset({"replace", "rewind", "restart"})


@dataclass(frozen=True, slots=True)
class Domain:
    """A rank that is alone, and an event that concerns it only.

    whole   the job
    own     the rank's own job
    event   with the own job's generation
    """

    whole: Job
    own: Job
    event: Event
    rank: int

    def take_back(self, own: Job, actions: tuple[Action, ...]) -> Result:
        """The whole job, after the rank's own one has answered."""
        if own == self.own and not actions:
            return self.whole, ()
        job = self.whole.with_members(own.members[self.rank])
        job = replace(
            job,
            alone={**job.alone, self.rank: own},
            incident_count=own.incident_count,
            openings=own.openings,
        )
        orders = tuple(self._as_order(action) for action in actions if not isinstance(action, FinishJob))
        if any(isinstance(action, RestartGroup | FailJob) for action in actions):
            after = replace(job, phase=own.phase, phase_since_s=own.phase_since_s, incident=own.incident)
            return give_up_repairs(job, after, orders, self.rank)
        if job.count("finished") == len(job.members):
            return replace(job, phase=JobPhase.DONE), (*orders, FinishJob())
        return job, orders

    def _as_order(self, action: Action) -> Action:
        """An action of the rank's own job, as an order of the whole job."""
        if isinstance(action, SetDeadline):
            return structs.replace(action, rank=self.rank)
        if isinstance(action, SpawnRank | Replay | LoadState | Resume):
            return structs.replace(action, generation=self.whole.generation)
        if isinstance(action, RecordIncident):
            return RecordIncident(replace(action.incident, generation=self.whole.generation))
        return action


def domain_of(job: Job, event: Event) -> Domain | None:
    """The rank that an event concerns alone; None if it concerns the whole job."""
    if not job.alone and not job.count("trains alone"):
        return None
    rank = event.rank if isinstance(event, RankEvent | SnapshotTaken | DeadlinePassed | SupervisorRenewed) else None
    if rank is None or job.settings.is_alone or isinstance(event, RankTrainsAlone | RankJoined):
        return None
    if not is_alone(job, rank):
        return None
    own = as_own(job, rank)
    return Domain(job, own, _as_heard(job, own, event), rank)


def is_alone(job: Job, rank: int) -> bool:
    """Whether a fault of this rank concerns no other now: it is the only rank, or trains without a group."""
    own = job.alone.get(rank)
    if job.settings.is_alone or (own is not None and own.phase not in _AT_REST):
        return True
    membership = job.members[rank].membership
    # Others may have begun to make a group: it does not concern this rank before it has joined.
    has_no_group = membership is GroupMembership.ALONE or (membership is GroupMembership.UNKNOWN and job.are_alone)
    return job.phase is JobPhase.RUNNING and has_no_group and not job.unprotected_reason


def as_own(job: Job, rank: int) -> Job:
    """The job of one rank, which shares the count of incidents with the others."""
    own = job.alone.get(rank)
    if own is None:
        settings = replace(job.settings, is_alone=True, rungs=job.settings.rungs & _RUNGS)
        own = Job(settings=settings, members=all_away(len(job.members)), phase_since_s=job.phase_since_s)
    own = own.with_members(job.members[rank])
    return replace(own, incident_count=job.incident_count, openings=job.openings, restarts=job.restarts)


@functools.cache
def all_away(world_size: int) -> Members:
    """The members of a rank's own job, before its own one is put among them."""
    return Members.of(Member(rank=rank, life=RankState.AWAY) for rank in range(world_size))


def _as_heard(job: Job, own: Job, event: Event) -> Event:
    if isinstance(event, RepairEvent):
        return structs.replace(event, generation=own.generation) if event.generation == job.generation else event
    if isinstance(event, SnapshotTaken | DeadlinePassed | SupervisorRenewed):
        return structs.replace(event, rank=None)
    return event


def give_up_repairs(before: Job, after: Job, actions: tuple[Action, ...], cause: int | None = None) -> Result:
    """The answer; if the whole job leaves RUNNING, repairs of single ranks are given up.

    cause   the rank whose own repair has led to it
    """
    if before.phase is not JobPhase.RUNNING or after.phase is JobPhase.RUNNING:
        return after, actions
    closed = []
    for rank, own in after.alone.items():
        if own.incident is None or rank == cause:
            continue
        why = own.incident.reason
        why = why.within(f"the repair was abandoned, since the job is {after.phase}; the cause: {why}")
        incident = replace(own.incident, outcome="failed", rung="fail", reason=why, generation=after.generation)
        closed.append(RecordIncident(replace(incident, total_s=after.phase_since_s - incident.opened_at_s)))
    return replace(after, alone={}), (*closed, *actions)


def on_joined(job: Job, event: RankJoined) -> Result:
    """The rank is one of a group: after its own repair, if one is open, its faults concern the whole job."""
    job = job.with_member(event.rank, membership=GroupMembership.JOINED, has_joined=True)
    own = job.alone.get(event.rank)
    if own is None or own.phase not in _AT_REST:
        return job, ()
    alone = {rank: other for rank, other in job.alone.items() if rank != event.rank}
    return replace(job, alone=alone, unprotected_reason=job.unprotected_reason or own.unprotected_reason), ()
