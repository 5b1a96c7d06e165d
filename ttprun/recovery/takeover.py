"""The job as it is taken over: by another agent if the leader is lost (`succeed`), or by a new supervisor of its own.

The agents report what they know of their own ranks; what concerns the whole job the lost leader had shared before. An
incident that was open is not continued: what is lost is reported anew, as `NodeLost` and `RankExited`, and repaired in
a new generation.

After a new supervisor the job itself is whole: it is what the recorded events come to. But some orders of the newest
event may not have been carried out. So what was going on is ordered again, as a new attempt; in RUNNING that is
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ttprun.protocol.meeting import GroupMembership, Known, Legacy
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Job, JobPhase, Settings
from ttprun.recovery.job_events import Saved, SupervisorRenewed
from ttprun.recovery.ladder import begin_persisting
from ttprun.recovery.members import Member, Members, RankState
from ttprun.recovery.on_hang import try_again
from ttprun.recovery.phases import FailJob, FinishJob, RestartGroup, Result, deadline_of, enter
from ttprun.recovery.replicas import Replicas


def known_of(job: Job, why_no_checkpoints: str) -> Known:
    """What another leader would have to know of a job, beside what its ranks report."""
    replicas = job.replicas
    return Known(
        incidents=job.incident_count,
        restarts=job.restarts,
        unprotected=job.unprotected_reason,
        compared_at=replicas.compared_at,
        differing=dict(replicas.differing),
        shards=dict(replicas.shards),
        names=dict(replicas.names),
        mirrored=tuple(sorted(replicas.mirrored)),
        has_collective_steps=replicas.has_collective_steps,
        why_no_checkpoints=why_no_checkpoints,
        saved={checkpoint.place: checkpoint.boundary for checkpoint in job.saved},
    )


def succeed(settings: Settings, legacies: Iterable[Legacy], generation: int, known: Known) -> Job:
    """The running job; what its ranks have lost is yet to be reported.

    legacies     one for each rank, in any order
    generation   the newest that any agent knows of

    Raises ValueError if a rank is missing.
    """
    by_rank = {legacy.rank: legacy for legacy in legacies}
    missing = [rank for rank in range(settings.world_size) if rank not in by_rank]
    if missing:
        raise ValueError(f"nothing is known of rank {missing[0]}")
    reasons = (
        legacy.unprotected.within(f"rank {legacy.rank} is not protected ({legacy.unprotected})")
        for legacy in by_rank.values()
        if legacy.unprotected
    )
    replicas = Replicas(
        compared_at=known.compared_at,
        differing=known.differing,
        shards=known.shards,
        names=known.names,
        mirrored=frozenset(known.mirrored),
        has_collective_steps=known.has_collective_steps,
    )
    return Job(
        settings=settings,
        members=Members.of(_member_of(by_rank[rank]) for rank in range(settings.world_size)),
        generation=generation,
        incident_count=known.incidents,
        restarts=known.restarts,
        unprotected_reason=known.unprotected or next(reasons, Reason()),
        replicas=replicas,
        saved=tuple(Saved(boundary, place) for place, boundary in known.saved.items()),
    )


def _member_of(legacy: Legacy) -> Member:
    return Member(
        rank=legacy.rank,
        pid=None if legacy.is_finished else legacy.pid,
        life=RankState.FINISHED if legacy.is_finished else RankState.LIVE,
        is_protected=legacy.is_protected,
        membership=legacy.membership,
        has_joined=legacy.membership is GroupMembership.JOINED,
        hindrance=legacy.hindrance,
    )


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
