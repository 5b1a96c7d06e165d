"""The rung "resize": the others train on without ranks for which there is no replacement, until these are called back.

Only a framework that can rebuild its groups for fewer ranks can do that; its ranks declare so (`ElasticDeclared`). With
a lost rank its whole data-parallel replica leaves (`RankState.AWAY`), and the rest must hold a whole copy of every
shard. How they are called back is in `on_request.py`. Begin with `give_up_replacing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ttprun.protocol.process_orders import KillRank
from ttprun.protocol.rank_events import RankStarted, SpawnFailed
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Freeze
from ttprun.recovery.job import Job, JobPhase, name_ranks
from ttprun.recovery.job_events import ElasticDeclared
from ttprun.recovery.ladder import take_lower_rung
from ttprun.recovery.members import Member, MemberFlag, RankState
from ttprun.recovery.phases import UNDONE, Result, deadline_of, enter, reason_of
from ttprun.recovery.shards import ReplicaGroup, groups_of, who_leaves


def on_declared(job: Job, event: ElasticDeclared) -> Result:
    """A rank can train on in a smaller group, and says with whom it trains; the newest word counts."""
    return job.with_member(event.rank, elastic=event), ()


def give_up_replacing(
    job: Job, at_s: float, why: Reason, is_refusal: bool = True, is_replayable: bool = True
) -> Result:
    """The lost ranks cannot be had again: the others train on without them, or the group is restarted.

    why                         for the operator
    is_refusal, is_replayable   see `take_lower_rung`
    """
    if not is_elastic(job):
        return take_lower_rung(job, at_s, why, is_refusal, is_replayable=is_replayable)
    why_not = why_not_without(job, job.lost)
    if why_not:
        return take_lower_rung(
            job,
            at_s,
            (why if why.kind else why_not).within(
                f"{why}; the others cannot continue without {name_ranks(job.lost)}: {why_not}"
            ),
        )
    return begin_shrinking(job, at_s, why)


def on_spawn_failed(job: Job, event: SpawnFailed) -> Result:
    """A rank gets no process; if it is lost, no other attempt is made."""
    job, _ = forget_spawn(job, event)
    if job.members[event.rank].life is not RankState.LOST:
        return job, ()
    why = Reason(text=f"no process can be started for rank {event.rank} ({event.reason})")
    return give_up_replacing(job, event.at_s, why, is_refusal=False)


def forget_spawn(job: Job, event: SpawnFailed) -> Result:
    """A rank gets no process, and no rank waits for it."""
    return job.with_member(event.rank, spawn_asked_at_s=None), ()


def is_elastic(job: Job) -> bool:
    """Whether fewer ranks are thought of at all."""
    return "resize" in job.settings.rungs and job.count(MemberFlag.IS_ELASTIC) > 0


def why_not_without(job: Job, lost: Collection[int]) -> Reason:
    """Why the others cannot train on without these ranks; "" if they can.

    lost   ranks that are there no more, beside those that are away already
    """
    if "resize" not in job.settings.rungs:
        return Reason("switched-off", "training with fewer ranks is switched off (rungs)")
    if job.unprotected_reason:
        return job.unprotected_reason
    if job.finished:
        return Reason(
            "ranks-have-finished", f"{name_ranks(job.finished)} finished before, so the group cannot be built again"
        )
    silent = tuple(member.rank for member in job.members if member.elastic is None)
    if silent:
        return Reason(text=f"{name_ranks(silent)} cannot train with fewer ranks (enable_zit and a handler for it)")
    leaving = who_would_leave(job, lost)
    rest = tuple(rank for rank in range(len(job.members)) if rank not in leaving)
    if not rest:
        return Reason("no-survivor", f"{name_ranks(leaving)} would have to leave, and no rank would remain")
    missing = next((group for group in replica_groups(job) if group.whole_copy(rest) is None), None)
    return (
        Reason("state-of-one-rank", f"for a shard of {name_ranks(missing.ranks)} no copy would remain")
        if missing is not None
        else Reason()
    )


def who_would_leave(job: Job, lost: Collection[int]) -> tuple[int, ...]:
    """These ranks, those that are away already, and the rest of the replicas of which they are a part."""
    groups = {member.rank: groups_by_kind(job, member.rank) for member in job.members}
    return who_leaves(groups, {*lost, *job.away})


def groups_by_kind(job: Job, rank: int) -> tuple[tuple[int, ...], ...]:
    """The data-parallel groups of a rank: those over which its optimizers are spread, then the one for its batches."""
    declared = job.members[rank].elastic
    over = tuple(group.ranks for group in declared_replicas(job, rank))
    return (*over, declared.data_parallel) if declared is not None and declared.data_parallel else over


def groups_left(job: Job, rank: int) -> tuple[tuple[int, ...], ...]:
    """The data-parallel groups of a rank, without the ranks that are away."""
    return tuple(tuple(other for other in group if other not in job.away) for group in groups_by_kind(job, rank))


def replica_groups(job: Job) -> frozenset[ReplicaGroup]:
    """All groups over which an optimizer is spread."""
    return frozenset(group for member in job.members for group in declared_replicas(job, member.rank))


def declared_replicas(job: Job, rank: int) -> tuple[ReplicaGroup, ...]:
    """What a rank has declared of its optimizers, or else that all ranks hold the same."""
    declared = job.members[rank].elastic
    replicas = {} if declared is None else {rank: declared.replicas}
    return tuple(groups_of(replicas, rank, len(job.members)))


def begin_shrinking(job: Job, at_s: float, why: Reason) -> Result:
    """The lost ranks and the rest of their replicas leave; the others freeze, and then connect as a smaller group.

    at_s   time of the event, monotonic
    why    for the operator; the ranks that leave are named after it
    """
    leaving = who_would_leave(job, job.lost)
    newly = tuple(rank for rank in leaving if rank not in job.away)
    kills = tuple(
        KillRank(rank, f"it leaves with {name_ranks(job.lost)}: {why}")
        for rank in newly
        if job.members[rank].pid is not None
    )
    reason = reason_of(job, why.within(f"{why}, so {name_ranks(newly)} {'leave' if len(newly) > 1 else 'leaves'}"))
    leavers = (
        replace(job.members[rank], pid=None, life=RankState.AWAY, is_rerun=False, is_protected=False) for rank in newly
    )
    job = replace(job.with_members(*leavers), generation=job.generation + 1, rewind_to=None)
    job = replace(job, members=job.members.with_each(Member.with_answers_forgotten))
    freeze = Freeze(job.survivors, job.generation, job.lost)
    actions = (freeze, *kills, deadline_of(job, JobPhase.FREEZING))
    return enter(job, JobPhase.FREEZING, at_s, actions, rung="resize", reason=reason, **UNDONE)


def unless_away(handler: Callable[[Job, RankStarted], Result]) -> Callable[[Job, RankStarted], Result]:
    """Answers the start of a process; one that was being started when its rank has left is not needed any more."""

    def on_started(job: Job, event: RankStarted) -> Result:
        if job.members[event.rank].life is not RankState.AWAY:
            return handler(job, event)
        job = job.with_member(event.rank, spawn_asked_at_s=None)
        return job, (KillRank(event.rank, "its rank has left, and the others continue without it"),)

    return on_started
