"""The job as the next agent takes it over, when the one that led is lost: begin with `succeed`.

The agents report what they know of their own ranks; what concerns the whole job the lost leader had shared before. An
incident that was open is not continued: what is lost is reported anew, as `NodeLost` and `RankExited`, and repaired in
a new generation.
"""

from __future__ import annotations

from collections.abc import Iterable

from ttprun.protocol.meeting import GroupMembership, Known, Legacy
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Job, Settings
from ttprun.recovery.leader_events import Saved
from ttprun.recovery.members import Life, Member, Members
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
        life=Life.FINISHED if legacy.is_finished else Life.LIVE,
        is_protected=legacy.is_protected,
        membership=legacy.membership,
        has_joined=legacy.membership is GroupMembership.JOINED,
        hindrance=legacy.hindrance,
    )
