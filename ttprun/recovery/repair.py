"""Handlers of a repair's phases, and of the checks that may stop it.

FREEZING -> REPLAYING -> TRANSFERRING -> RESUMING -> RUNNING; from boundary 0, or if no rank is lost, directly to
RESUMING. A function `end_...` begins the next phase if all ranks have answered.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ttprun.protocol.from_rank import RankFrozen, RankRebuilt, RankReissued, RankRepaired, RankReplayed, StateSent
from ttprun.protocol.process_orders import Action, KillRank, ParkRank, SpawnRank
from ttprun.protocol.rank_events import MismatchFound, RankStarted
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import LoadMirror, LoadState, Replay, Resume, SendState
from ttprun.recovery.job import Job, JobPhase
from ttprun.recovery.job_events import name_ranks
from ttprun.recovery.ladder import end_job, leave_group, take_lower_rung
from ttprun.recovery.members import Member, RankState
from ttprun.recovery.phases import (
    FinishJob,
    LetNodeGo,
    Result,
    UnexpectedStart,
    deadline_of,
    enter,
    unchanged,
)
from ttprun.recovery.state_origins import ANEW, Refusal, from_others, steps_reached, why_no_source


def note_process(job: Job, event: RankStarted) -> Job:
    """The rank has a process. Raises UnexpectedStart if it needs none."""
    member = job.members[event.rank]
    if member.pid == event.pid:
        return job
    if member.pid is not None or member.life is RankState.FINISHED:
        raise UnexpectedStart(f"rank {event.rank} was started, but it needs no process", job, event)
    if member.spawn_asked_at_s is not None and job.incident is not None:
        spawn_s = max(job.incident.spawn_s or 0.0, event.at_s - member.spawn_asked_at_s)
        had_standby = job.incident.had_standby is not False and event.had_standby
        job = job.with_incident(spawn_s=spawn_s, had_standby=had_standby)
    changes = {"pid": event.pid, "spawn_asked_at_s": None, "started_at_s": event.at_s, "is_without_node": False}
    return job.with_member(event.rank, **changes)


def on_started(job: Job, event: RankStarted) -> Result:
    """A rank has a process, for which nothing waits."""
    return note_process(job, event), ()


def on_started_in_freezing(job: Job, event: RankStarted) -> Result:
    """A replacement has started; at boundary 0 it may be the last one that was missing."""
    return end_freezing(note_process(job, event), event.at_s)


def on_frozen(job: Job, event: RankFrozen) -> Result:
    """A survivor is quiesced; its first answer counts."""
    member = job.members[event.rank]
    if member.life is not RankState.LIVE or member.frozen is not None:
        return unchanged(job, event)
    job = job.with_member(event.rank, frozen=event)
    if is_anyone_moving(job):
        return job, ()
    job = job.with_incident(freeze_s=event.at_s - job.phase_since_s)
    disagreement = why_survivors_disagree(job)
    if disagreement:
        return take_lower_rung(job, event.at_s, disagreement, is_trusted=False)
    return end_freezing(job.with_incident(boundary=event.boundary), event.at_s)


def end_freezing(job: Job, at_s: float) -> Result:
    """If all survivors are quiesced: replay, or at boundary 0 run the replacements live from the top.

    If no rank is lost, only the connections are repaired. At boundary 0 every replacement must have a process first,
    since Resume is sent to all at once.
    """
    source = job.source
    if source is None or is_anyone_moving(job):
        return job, ()
    if job.leaving:
        return replace_leaving(job, at_s, source.boundary)
    if not job.lost:
        return begin_resuming(job, at_s, source.boundary)
    why_not = why_no_source(job, job.lost, job.quiesced)
    if source.boundary > 0 and why_not:
        return take_lower_rung(job, at_s, why_not)
    if source.boundary > 0:
        job, replays = order_replays(job, job.lost)
        return enter(job, JobPhase.REPLAYING, at_s, (*replays, deadline_of(job, JobPhase.REPLAYING)))
    if job.count("must start"):
        return job, ()
    return begin_resuming(job, at_s, boundary=0, extra_s=job.settings.limits.replay_s)


def replace_leaving(job: Job, at_s: float, boundary: int) -> Result:
    """All stand still: those that are to be replaced are lost from now on, unless they could not be repaired here."""
    leaving, frozen = job.leaving, [member.frozen for member in job.members if member.frozen is not None]
    others = tuple(rank for rank in job.quiesced if rank not in leaving)
    why_not = why_no_source(job, leaving, others)
    if not boundary:
        why_not = Reason("no-step-yet", "no step has been taken yet")
    elif any(answer.is_at_end for answer in frozen):
        why_not = Reason("ranks-have-finished", "the script has come to its end")
    kept = tuple(job.members[rank].with_answers_forgotten() for rank in leaving if job.keeps_old)
    job = replace(job, leaving=())
    if why_not:
        reason = Reason() if job.incident is None else job.incident.reason
        job = job.with_incident(rung="reconnect", reason=why_not.within(f"{reason}; not replaced: {why_not}"))
        return begin_resuming(job, at_s, boundary)
    end = ParkRank if job.keeps_old else KillRank
    actions: list[Action] = [LetNodeGo(leaving, job.cause)] if job.leaves_node else []
    for rank in leaving:
        actions += [] if job.leaves_node else [end(rank, job.cause)]
        actions.append(SpawnRank(rank, job.generation))
        lost = replace(job.members[rank].with_answers_forgotten(), pid=None, life=RankState.LOST, is_protected=False)
        job = job.with_members(replace(lost, spawn_asked_at_s=at_s, is_without_node=job.leaves_node))
    job = replace(job, kept=kept, in_memory=() if job.leaves_node else job.in_memory)
    return enter(
        job, JobPhase.REPLAYING, at_s, (*actions, deadline_of(job, JobPhase.REPLAYING)), rung="replace", ranks=leaving
    )


def is_anyone_moving(job: Job) -> bool:
    """Whether some survivor is not quiesced yet."""
    return job.count("must freeze") > 0


def why_survivors_disagree(job: Job) -> Reason:
    """Why the survivors' states allow no repair; "" if they agree."""
    frozen = [member.frozen for member in job.members if member.frozen is not None]
    if len({answer.boundary for answer in frozen}) > 1:
        places = ", ".join(f"rank {answer.rank} at step {answer.boundary}" for answer in frozen)
        return Reason("survivors-disagree", f"the surviving ranks are at different steps: {places}")
    for ranks in job.replicas.alike(job.quiesced):
        of_alike = [answer for rank in ranks if (answer := job.members[rank].frozen) is not None]
        if len({answer.digest for answer in of_alike}) > 1:
            digests = ", ".join(f"rank {answer.rank} has {answer.digest or 'none'}" for answer in of_alike)
            return Reason(
                "other-weights",
                f"the surviving ranks' states differ at step {frozen[0].boundary}: {digests}",
            )
    if len(job.members) == 1:
        return Reason()  # it needs no other
    alone = tuple(answer.rank for answer in frozen if answer.boundary > 0 and not answer.has_group)
    return (
        Reason("survivors-disagree", f"{name_ranks(alone)} trained without a process group, so no rank can repair it")
        if alone
        else Reason()
    )


def order_replays(job: Job, ranks: Collection[int]) -> tuple[Job, tuple[Replay, ...]]:
    """Order those of these lost ranks that have a process and no orders yet to replay."""
    target = job.target
    members = map(job.members.__getitem__, ranks)
    ready = [member for member in members if member.pid is not None and not member.has_orders]
    if target is None or not ready:
        return job, ()
    sources = sources_of(job, [member.rank for member in ready])
    orders = tuple(Replay(member.rank, job.generation, target, sources.get(member.rank)) for member in ready)
    return job.with_members(*(replace(member, has_orders=True) for member in ready)), orders


def on_started_in_replaying(job: Job, event: RankStarted) -> Result:
    """A replacement has started, and the boundary is known; if all start from the top, resume after the last one."""
    job = note_process(job, event)
    if job.back_to != ANEW:
        return order_replays(job, (event.rank,) if job.members[event.rank].life is RankState.LOST else ())
    if job.count("must start"):
        return job, ()
    return begin_resuming(job, event.at_s, boundary=0, extra_s=job.settings.limits.replay_s)


def on_replayed(job: Job, event: RankReplayed) -> Result:
    """A replacement has reached the boundary; after the last one the sources send, or all load a snapshot."""
    target = job.target
    member = job.members[event.rank]
    if target is None or member.life is not RankState.LOST or not member.has_orders:
        return unchanged(job, event)
    if event.boundary != target:
        return take_lower_rung(
            job,
            event.at_s,
            Reason("other-place", f"rank {event.rank} replayed up to step {event.boundary} instead of {target}"),
            is_replayable=False,
        )
    job = job.with_member(event.rank, has_replayed=True)
    if job.count("must replay"):
        return job, ()
    last_start_at_s = max((job.members[rank].started_at_s or 0.0 for rank in job.lost), default=0.0)
    job = job.with_incident(replay_s=event.at_s - max(job.phase_since_s, last_start_at_s))
    job, orders = order_transfers(job, target)
    return enter(job, JobPhase.TRANSFERRING, event.at_s, (*orders, deadline_of(job, JobPhase.TRANSFERRING)))


def sources_of(job: Job, ranks: Collection[int]) -> dict[int, int]:
    """Who gives each of these lost ranks its state, itself if it is its mirror; nobody, if all go back."""
    given = {} if job.back_to is not None else from_others(job, ranks, job.quiesced)
    if isinstance(given, Refusal):
        return {}
    return {rank: origin.source for rank, origin in given.items() if origin.source is not None}


def order_transfers(job: Job, target: int) -> tuple[Job, tuple[LoadState | SendState | LoadMirror, ...]]:
    """Each source sends to the lost ranks of which it is a replica, the others load their mirrors.

    In a rewind all load the snapshot.
    """
    if job.back_to is not None:
        return job, (LoadState(job.lost, job.generation, target),)
    receivers: dict[int, list[int]] = {}
    for rank, source in sources_of(job, job.lost).items():
        receivers.setdefault(source, []).append(rank)
    loads = [LoadMirror(rank, job.generation, target) for rank in receivers if job.members[rank].life is RankState.LOST]
    senders = [
        replace(member, sends_to=tuple(receivers[member.rank]))
        for member in map(job.members.__getitem__, sorted(receivers))
        if member.life is RankState.LIVE
    ]
    sends = (SendState(member.rank, member.sends_to, job.generation, target) for member in senders)
    return job.with_members(*senders), (*sends, *loads)


def on_state_sent(job: Job, event: StateSent) -> Result:
    """A source has sent its state to all replacements that get it."""
    if not job.members[event.rank].sends_to:
        return unchanged(job, event)
    return end_transferring(job.with_member(event.rank, sent_digest=event.digest), event.at_s)


def on_repaired(job: Job, event: RankRepaired) -> Result:
    """A replacement has loaded the state."""
    if job.members[event.rank].life is not RankState.LOST:
        return unchanged(job, event)
    if event.boundary is not None:
        job = job.with_incident(boundary=event.boundary)
    return end_transferring(job.with_member(event.rank, repaired_digest=event.digest), event.at_s)


def end_transferring(job: Job, at_s: float) -> Result:
    """If the state is sent, loaded and equal everywhere: all resume."""
    if job.count("must load") or job.count("must send"):
        return job, ()
    source = job.source
    if job.back_to is not None:
        return end_loading(job, at_s, job.back_to.boundary)
    if source is None:
        return job, ()
    senders = [member for member in job.members if member.sends_to]
    why = next(filter(None, (why_not_as_sent(job, sender) for sender in senders)), Reason())
    why = why or why_not_as_mirrored(job, source)
    if why:
        return take_lower_rung(job, at_s, why, is_trusted=all(map(is_as_frozen, senders)))
    job = job.with_incident(transfer_s=at_s - job.phase_since_s)
    return begin_resuming(job, at_s, stands_at(job, source))


def why_not_as_sent(job: Job, source: Member) -> Reason:
    """How the state that a source has sent differs from its frozen state, or from the loaded one; "" if it does not."""
    sent = source.sent_digest or "none"
    if source.frozen is not None and not is_as_frozen(source):
        return Reason(
            "other-weights", f"rank {source.rank} froze with state {source.frozen.digest or 'none'}, but sent {sent}"
        )
    wrong = [
        member
        for member in map(job.members.__getitem__, source.sends_to)
        if member.repaired_digest != source.sent_digest
    ]
    loaded = ", ".join(f"rank {member.rank} loaded {member.repaired_digest or 'none'}" for member in wrong)
    return Reason("other-weights", f"rank {source.rank} sent state {sent}, but {loaded}") if wrong else Reason()


def why_not_as_mirrored(job: Job, source: RankFrozen) -> Reason:
    """How what ranks have loaded from their mirrors differs from what all ranks hold alike; "" if it does not.

    A digest is of all but declared shards.
    """
    if job.replicas.differing:
        return Reason()
    sent = {rank for member in job.members for rank in member.sends_to}
    loaded = (member for member in job.replacements if member.rank not in sent)
    wrong = next((member for member in loaded if member.repaired_digest != source.digest), None)
    if wrong is None:
        return Reason()
    theirs = source.digest or "none"
    return Reason(
        "other-weights",
        f"rank {source.rank} froze with state {theirs}, but rank {wrong.rank} loaded {wrong.repaired_digest}",
    )


def is_as_frozen(source: Member) -> bool:
    """Whether a source has sent its frozen state."""
    return source.frozen is None or source.sent_digest == source.frozen.digest


def stands_at(job: Job, source: RankFrozen) -> int:
    """The boundary from which all resume: the source's, or that of a checkpoint that all have loaded."""
    return source.boundary if job.incident is None or job.incident.boundary is None else job.incident.boundary


def end_loading(job: Job, at_s: float, boundary: int) -> Result:
    """All have loaded a snapshot: if replicas have equal state, all resume.

    at_s       time of the event, monotonic
    boundary   of the snapshot, from which all resume
    """
    for ranks in job.replicas.alike(job.lost):
        if len({job.members[rank].repaired_digest for rank in ranks}) > 1:
            loaded = ", ".join(f"rank {rank} {job.members[rank].repaired_digest}" for rank in ranks)
            return take_lower_rung(
                job, at_s, Reason("other-weights", f"the ranks hold different states after loading: {loaded}")
            )
    return begin_resuming(job.with_incident(transfer_s=at_s - job.phase_since_s), at_s, boundary)


def begin_resuming(job: Job, at_s: float, boundary: int, extra_s: float = 0.0) -> Result:
    """All connect in the new generation, and issue their journals.

    extra_s   added to the deadline
    """
    job = job.with_members(*(replace(member, has_orders=True) for member in job.replacements))
    ranks = tuple(sorted((*job.survivors, *job.lost)))
    actions = (Resume(ranks, job.generation, boundary), deadline_of(job, JobPhase.RESUMING, extra_s))
    return enter(job, JobPhase.RESUMING, at_s, actions)


def on_rebuilt(job: Job, event: RankRebuilt) -> Result:
    """A rank is connected."""
    return end_resuming(job.with_member(event.rank, has_rebuilt=True), event.at_s)


def on_reissued(job: Job, event: RankReissued) -> Result:
    """A rank has caught up. A replacement is a full member from now on: it may survive, and be a source."""
    return end_resuming(job.with_member(event.rank, has_reissued=True, life=RankState.LIVE, is_rerun=False), event.at_s)


def end_resuming(job: Job, at_s: float) -> Result:
    """If all ranks that have not finished are connected and have caught up: the job runs again, or ends as ordered."""
    if job.count("must connect"):
        return job, ()
    if job.incident is not None and job.incident.rebuild_s is None:
        job = job.with_incident(rebuild_s=at_s - job.phase_since_s)
    if job.count("must reissue"):
        return job, ()
    if job.ending is not None:
        return end_job(job, at_s)
    rebuild_s = job.incident.rebuild_s if job.incident is not None else None
    reissue_s = at_s - job.phase_since_s - (rebuild_s or 0.0)
    steps_lost = steps_lost_by_rewinding(job)
    members = job.members.with_each(Member.with_answers_forgotten)
    job = replace(job, members=members, back_to=None, is_resumed=False, stood_at=None)
    phase, actions = (JobPhase.RUNNING, ()) if job.count("live") else (JobPhase.DONE, (FinishJob(),))
    return enter(job, phase, at_s, actions, outcome="recovered", steps_lost=steps_lost, reissue_s=reissue_s)


def steps_lost_by_rewinding(job: Job) -> int:
    """Optimizer steps that were complete at the fault, and are after the snapshot or checkpoint."""
    if job.back_to is None:
        return 0 if job.source is None else job.source.boundary - stands_at(job, job.source)
    if job.is_resumed:
        return 0
    return max(0, steps_reached(job) - job.back_to.boundary)


def give_up_on_mismatch(job: Job, event: MismatchFound) -> Result:
    """Another attempt would find the same, so there is none.

    If no rank is lost, the script itself has brought its ranks into different collectives, and would do so again.
    """
    if job.phase is JobPhase.FREEZING and not job.lost:
        return leave_group(job, event.at_s, event.reason, goes_on=False)
    return take_lower_rung(job, event.at_s, event.why, is_replayable=not event.is_contradiction)


def missing_from(job: Job) -> str:
    """What the current phase waits for, for an operator: "rank 1 to freeze, rank 2 to start"."""
    missing = ((member.rank, what_is_missing(job, member)) for member in job.members)
    return ", ".join(f"rank {rank} {what}" for rank, what in missing if what)


def what_is_missing(job: Job, member: Member) -> str:
    """What the current phase waits for from one rank; "" if nothing."""
    is_replacement = member.life is RankState.LOST
    if member.life is RankState.AWAY:
        return ""
    if is_replacement and member.pid is None:
        return "to start"
    match job.phase:
        case JobPhase.FREEZING if not is_replacement and member.frozen is None:
            return "to freeze"
        case JobPhase.REPLAYING if is_replacement and not member.has_replayed:
            return "to replay"
        case JobPhase.TRANSFERRING if member.sends_to and member.sent_digest is None:
            return "to send its state"
        case JobPhase.TRANSFERRING if is_replacement and member.repaired_digest is None:
            return "to load its state"
        case JobPhase.PERSISTING if not is_replacement and member.frozen is None:
            return "to quiesce"
        case JobPhase.PERSISTING if member.life is RankState.LIVE and job.persists_at is not None:
            return "to write its state"
        case JobPhase.DRAINING if member.life is RankState.LIVE:
            return "to finish"
        case JobPhase.RESUMING if member.life is not RankState.FINISHED and not member.has_rebuilt:
            return "to connect"
        case JobPhase.RESUMING if member.life is not RankState.FINISHED and not member.has_reissued:
            return "to issue its journal"
    return ""
