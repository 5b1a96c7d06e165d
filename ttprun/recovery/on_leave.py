"""Ranks that leave: with exit code 0 while others still wait for them, or because there is no replacement for them.

A script that ends ranks on purpose does not get them back, as they would leave again: the job ends as under torchrun,
or starts again if a restart is left, after the others have saved its state. That others wait is seen by a connection
that breaks, by a collective that nobody else joins, or by all others standing still. See `end_without_leavers`.

With the rung "resize" the others train on without ranks for which there is no replacement, until these are called back.
Only a framework that can rebuild its groups for fewer ranks can do that; its ranks declare so (`ElasticDeclared`). With
a lost rank its whole data-parallel replica leaves (`RankState.AWAY`), and the rest must hold a whole copy of every
shard. How they are called back is in `on_request.py`. See `give_up_replacing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.process_orders import Action, KillRank
from ttprun.protocol.rank_events import RankExited, RankStarted, SpawnFailed
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Freeze
from ttprun.recovery.job import Ending, Job, JobPhase
from ttprun.recovery.job_events import ConnectionBroken, DeadlinePassed, name_ranks
from ttprun.recovery.ladder import (
    drain,
    end_with,
    finish_job,
    take_lower_rung,
)
from ttprun.recovery.members import Member, RankState
from ttprun.recovery.phases import (
    DEADLINE_NAMES,
    UNDONE,
    Result,
    deadline_of,
    enter,
    open_incident,
    reason_of,
    unchanged,
)
from ttprun.recovery.shards import ReplicaGroup, groups_of, who_leaves
from ttprun.recovery.state_origins import why_no_restart

LEFT = "exit 0"  # kind of the incident
_CONSEQUENCES = ("connection", "checkpoint", LEFT)  # kinds of incidents that a rank's leaving may have opened


def on_broken_by_leaver(job: Job, event: ConnectionBroken) -> Result:
    """RUNNING: a rank waits for one that has left."""
    job = open_incident(job, event.at_s, LEFT, event.sentence, event.detected_after_s)
    return end_without_leavers(job, event.at_s)


def let_others_finish(job: Job, event: RankExited) -> Result:
    """The group is about to be connected again, and a rank has finished without waiting for that."""
    has_resumed = job.phase is JobPhase.RESUMING
    job = mark_finished(job, event)
    if has_resumed:  # they stood still, and have been ordered to go on since
        job = replace(job, members=job.members.with_each(Member.with_answers_forgotten))
    if job.incident is None and job.survivors:
        fault = f"rank {event.rank} finished while all waited for a checkpoint"
        job = open_incident(job, event.at_s, LEFT, fault, detect_s=0.0)
    why = f"rank {event.rank} has finished, and the group cannot be built again without it"
    job, actions = drain(job, event.at_s, Reason("ranks-have-finished", why))
    return end_standstill(job, event.at_s, actions) if job.phase is JobPhase.DRAINING else (job, actions)


def mark_finished(job: Job, event: RankExited) -> Job:
    """The rank's script has reached its end."""
    return job.with_member(event.rank, pid=None, life=RankState.FINISHED)


def on_frozen_while_draining(job: Job, event: RankFrozen) -> Result:
    """A rank stands still; if all do, and some not at the script's end, nobody will finish any more."""
    member = job.members[event.rank]
    if member.life is not RankState.LIVE or member.frozen is not None:
        return unchanged(job, event)
    return end_standstill(job.with_member(event.rank, frozen=event), event.at_s)


def on_broken_while_draining(job: Job, event: ConnectionBroken) -> Result:
    """A rank waits in a collective that will never complete."""
    return end_drain_early(job, event.at_s, Reason(text=event.sentence))


def end_standstill(job: Job, at_s: float, actions: tuple[Action, ...] = ()) -> Result:
    """End the drain if all ranks that are left stand still, and some wait for others."""
    live = [job.members[rank] for rank in job.survivors]
    if any(member.frozen is None for member in live):
        return job, actions
    waiting = tuple(member.rank for member in live if member.frozen is not None and not member.frozen.is_at_end)
    if not waiting:
        return job, actions
    after, more = end_drain_early(
        job, at_s, Reason("ranks-have-finished", f"{name_ranks(waiting)} cannot finish without the others")
    )
    return after, (*actions, *more)


def end_drain_early(job: Job, at_s: float, why: Reason) -> Result:
    """Ranks are left that will not finish."""
    return take_lower_rung(job, at_s, why) if job.lost else end_without_leavers(job, at_s)


def end_drain(job: Job, at_s: float) -> Result:
    """The job ends, if no rank runs any more."""
    if job.count("live"):
        return job, ()
    why = f"{name_ranks(job.lost)} did not finish, and no other rank is running any more"
    return take_lower_rung(job, at_s, Reason("ranks-have-finished", why)) if job.lost else finish_job(job, at_s)


def on_drain_deadline(job: Job, event: DeadlinePassed) -> Result:
    """The ranks that have not finished in time wait for a rank that is not there: restart the group, or end."""
    if event.name != DEADLINE_NAMES[JobPhase.DRAINING]:
        return unchanged(job, event)
    waited_s = event.at_s - job.phase_since_s
    return end_drain_early(
        job, event.at_s, Reason(text=f"{name_ranks(job.survivors)} did not finish within {waited_s:.0f} s")
    )


def end_without_leavers(job: Job, at_s: float) -> Result:
    """The others write the job's state, and then all ends, or starts again from the script's top."""
    leavers = job.finished
    assert job.incident is not None
    fault = f"{name_ranks(leavers)} left with exit code 0 while {name_ranks(job.survivors)} still needed it"
    if len(leavers) > 1:
        fault = fault.removesuffix("it") + "them"
    if job.incident.kind not in _CONSEQUENCES:
        fault = f"{fault}; {job.cause}"
    gone = (job.members[rank] for rank in leavers)
    job = job.with_members(
        *(replace(member, life=RankState.LOST, is_rerun=False, is_protected=False) for member in gone)
    )
    job = replace(job, cause=fault).with_incident(kind=LEFT, ranks=leavers, reason=Reason(text=fault))
    why_not = why_no_restart(job)
    rung, reason = "fail" if why_not else "restart", Reason(text=fault)
    return end_with(job, at_s, Ending(reason=reason, rung=rung, is_restart=not why_not, why=reason))


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
    return "resize" in job.settings.rungs and job.count("elastic") > 0


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
    job = replace(job.with_members(*leavers), generation=job.generation + 1, back_to=None)
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
