"""The job as the next agent takes it over, when the one that led is lost: begin with `succeed`.

The agents report what they know of their own ranks; what concerns the whole job the lost leader had shared before. An
incident that was open is not continued: what is lost is reported anew, as `NodeLost` and `RankExited`, and repaired in
a new generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ttprun.recovery.events import Saved
from ttprun.recovery.job import Job, Settings
from ttprun.recovery.members import GroupMembership, Life, Member, Members
from ttprun.recovery.replicas import UNKNOWN, Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """One rank, as the agent of its node reports it.

    pid            of its newest process, which may have ended; None: it has none, or its agent is lost
    is_finished    its script has reached its end
    is_protected   its hooks have reported
    membership     its connection with the others
    hindrance      why its newest boundary cannot be replayed; "" if it can
    """

    rank: int
    pid: int | None = None
    is_finished: bool = False
    is_protected: bool = False
    membership: GroupMembership = GroupMembership.UNKNOWN
    hindrance: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What the lost leader had shared of the whole job.

    incident_count      incidents so far, with the open one
    restarts            of the whole group so far
    unprotected_reason  why no rank can be replaced any more; "" if they can
    replicas            which ranks hold the same
    saved               checkpoints from which all can resume
    """

    incident_count: int = 0
    restarts: int = 0
    unprotected_reason: str = ""
    replicas: Replicas = field(default=UNKNOWN)
    saved: tuple[Saved, ...] = ()


def succeed(settings: Settings, remaining: Iterable[Remaining], generation: int, inherited: Inherited) -> Job:
    """The running job; what its ranks have lost is yet to be reported.

    remaining    one for each rank, in any order
    generation   the newest that any agent knows of

    Raises ValueError if a rank is missing.
    """
    by_rank = {one.rank: one for one in remaining}
    missing = [rank for rank in range(settings.world_size) if rank not in by_rank]
    if missing:
        raise ValueError(f"nothing is known of rank {missing[0]}")
    members = Members.of(_member_of(by_rank[rank]) for rank in range(settings.world_size))
    return Job(
        settings=settings,
        members=members,
        generation=generation,
        incident_count=inherited.incident_count,
        restarts=inherited.restarts,
        unprotected_reason=inherited.unprotected_reason,
        replicas=inherited.replicas,
        saved=inherited.saved,
    )


def _member_of(one: Remaining) -> Member:
    return Member(
        rank=one.rank,
        pid=None if one.is_finished else one.pid,
        life=Life.FINISHED if one.is_finished else Life.LIVE,
        is_protected=one.is_protected,
        membership=one.membership,
        has_joined=one.membership is GroupMembership.JOINED,
        hindrance=one.hindrance,
    )
