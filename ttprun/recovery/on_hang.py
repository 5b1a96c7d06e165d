"""Handlers for ranks that hang or diverge, deadlines that pass, connections that break, a supervisor that fails.

A process that does not answer is treated like one that has ended: it is killed, and its rank is lost. Read
`who_is_guilty` first.
"""

from __future__ import annotations

from dataclasses import replace

from ttprun.protocol.process_orders import KillRank
from ttprun.protocol.rank_events import MismatchFound, RankExited
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import NOBODY, FaultIdentity, Job, JobPhase
from ttprun.recovery.job_events import (
    ConnectionBroken,
    DeadlinePassed,
    RankDiverged,
    RankHung,
    SupervisorRenewed,
    name_ranks,
)
from ttprun.recovery.ladder import (
    begin_attempt,
    begin_persisting,
    drain,
    end_job,
    fail_job,
    take_lower_rung,
    why_too_many_incidents,
)
from ttprun.recovery.members import Member, RankState
from ttprun.recovery.on_leave import give_up_replacing, on_broken_by_leaver
from ttprun.recovery.on_loss import answer_fault, note_fault, why_not_protected
from ttprun.recovery.phases import (
    DEADLINE_NAMES,
    FailJob,
    FinishJob,
    RestartGroup,
    Result,
    add_fault,
    deadline_of,
    enter,
    open_incident,
    unchanged,
)
from ttprun.recovery.repair import give_up_on_mismatch, missing_from, what_is_missing


def on_unfit(job: Job, event: RankHung | RankDiverged) -> Result:
    """A rank hangs, or trains with other weights than the majority: its process is replaced.

    One that comes to a call in which the process before it hung may only be slow there, and would come there a third
    time: it is left alone up to the time limit of its process group.
    """
    if not (isinstance(event, RankHung) and event.is_in_script):
        return lose(job, (event,))
    if has_hung_before(job, event.rank, event.boundary):
        if not event.is_overdue:
            return unchanged(job, event)
        fault = f"rank {event.rank} hangs again in step {event.boundary} ({event.reason})"
        job = replace(note_fault(job, event), cause=fault).with_incident(reason=Reason(text=fault))
        kill = KillRank(event.rank, event.sentence)
        job, actions = fail_job(job, event.at_s, Reason(), has_progress=False, rung="fail")
        return job, (kill, *actions)
    is_opening = job.incident is None
    job, actions = lose(job, (event,))
    if not is_opening:
        identity = FaultIdentity(rank=event.rank, kind=event.kind, boundary=event.boundary)
        job = replace(job, faults=(*job.faults, identity))
    return job, actions


def has_hung_before(job: Job, rank: int, boundary: int) -> bool:
    """Whether a process of this rank hung in the same step."""
    return FaultIdentity(rank=rank, kind=RankHung.kind, boundary=boundary) in job.faults


def on_deadline(job: Job, event: DeadlinePassed) -> Result:
    """The phase has taken too long, if it is the current phase's deadline: the ranks that held it up are replaced.

    If no rank would be left to repair from, the group is restarted instead; also if a rank has not got its first
    process yet, since a second one must not be requested.
    """
    if event.name != DEADLINE_NAMES[job.phase]:
        return unchanged(job, event)
    if job.ending is not None:  # all have resumed only to end by themselves
        return end_job(job, event.at_s)
    took_s = event.at_s - job.phase_since_s
    guilty = who_is_guilty(job, event.silent)
    if job.phase is JobPhase.RESUMING and not event.silent and all(is_slow_there(job, rank) for rank in guilty):
        return job, (deadline_of(job, job.phase),)
    is_anyone_unstarted = any(job.members[rank].pid is None for rank in job.survivors)
    is_anyone_left = bool({*job.survivors} - {*guilty}) or job.back_to is not None
    if is_anyone_unstarted or not is_anyone_left:
        return take_lower_rung(
            job,
            event.at_s,
            Reason("recovery-failed", f"{job.phase} took more than {took_s:.0f} s: waited for {missing_from(job)}"),
            is_refusal=False,
        )
    hung = (
        RankHung(
            at_s=event.at_s,
            rank=rank,
            pid=job.members[rank].pid,
            boundary=where_the_job_stands(job),
            detected_after_s=took_s,
            reason=f"it had {took_s:.0f} s {what_is_missing(job, job.members[rank])}",
        )
        for rank in guilty
    )
    return lose(job, tuple(hung), is_costly=True)


def is_slow_there(job: Job, rank: int) -> bool:
    """Whether a replacement takes over the step in which a process of its rank hung: the time limit of its process
    group ends that, and no deadline of ours."""
    is_known = has_hung_before(job, rank, where_the_job_stands(job))
    return is_known and what_is_missing(job, job.members[rank]) == "to issue its journal"


def who_is_guilty(job: Job, silent: tuple[int, ...]) -> tuple[int, ...]:
    """Of the ranks that have not answered, those that block the others.

    The ranks that the agent found silent come first. Otherwise the replacements are blamed: they can be replaced again,
    and a survivor that hangs will not answer the next freeze either. During a freeze, only survivors are waited for;
    during a resume, ranks that are not connected block the journals of all.
    """
    wanted = [(member, what) for member in job.members if (what := what_is_missing(job, member))]
    missing = [member for member, what in wanted if what == "to connect"] or [member for member, _ in wanted]
    of_silent = frozenset(silent)
    seen_silent = tuple(member.rank for member in missing if member.rank in of_silent)
    first = RankState.LIVE if job.phase is JobPhase.FREEZING else RankState.LOST
    likely = tuple(member.rank for member in missing if member.life is first)
    return seen_silent or likely or tuple(member.rank for member in missing)


def who_is_awaited(job: Job) -> tuple[int, ...]:
    """The ranks that hold the current phase up; () if nothing is waited for."""
    if job.phase is JobPhase.RUNNING:
        return ()
    if job.phase is JobPhase.DRAINING or (job.phase is JobPhase.PERSISTING and job.persists_at is not None):
        return job.survivors
    return who_is_guilty(job, silent=())


def is_last_survivor(job: Job, rank: int) -> bool:
    """Whether only this rank is left to repair others from: it is not ended for its silence before its deadline."""
    return job.incident is not None and job.back_to is None and bool(job.lost) and job.survivors == (rank,)


def where_the_job_stands(job: Job) -> int:
    """The survivors' boundary; before they have reported it, that of the first fault."""
    if job.source is not None:
        return job.source.boundary
    return job.faults[-1].boundary if job.faults else 0


def lose(job: Job, hung: tuple[RankHung | RankDiverged, ...], is_costly: bool = False) -> Result:
    """Kill processes that hang, all in one incident, and treat them as lost ranks.

    hung        at least one; a rank without a process (pid None) is lost too, but there is nothing to kill
    is_costly   as for `answer_fault`
    """
    kills = tuple(KillRank(event.rank, event.sentence) for event in hung if event.pid is not None)
    *others, last = hung
    for other in others:
        job = note_fault(job, other)
    job, actions = answer_fault(job, last, is_costly)
    return job, (*kills, *actions)


def on_connection_broken(job: Job, event: ConnectionBroken) -> Result:
    """RUNNING: no rank died or hangs, so all reconnect; if that has not helped before, the group restarts.

    If nothing has broken, and they have reconnected in vain, the time limit of the process group ends the wait.
    If a rank's device has reported the error, that rank gets a new process first. If a rank has finished, the others
    still need it. A job that cannot be repaired is left alone: the script gets its backend's error, as under torchrun.
    """
    if why_not_protected(job):
        return unchanged(job, event)
    if job.finished:
        return on_broken_by_leaver(job, event)
    times = sum(past.rank == NOBODY and past.boundary == event.boundary for past in job.faults)
    may_reconnect = "reconnect" in job.settings.rungs
    if event.is_silent and (times >= job.settings.max_reconnects or not may_reconnect):
        return unchanged(job, event)
    fault = FaultIdentity(rank=NOBODY, kind=event.kind, boundary=event.boundary)
    job = replace(job, faults=(*(past for past in job.faults if past.boundary == fault.boundary), fault))
    times += 1
    if times == job.settings.max_reconnects + 1 and event.rank is not None:
        return lose_to_device(job, event, job.members[event.rank])
    job = open_incident(job, event.at_s, event.kind, event.sentence, event.detected_after_s)
    job = job.with_incident(rung="reconnect")
    why_hopeless = why_too_many_incidents(job)
    if why_hopeless:
        return fail_job(job, event.at_s, why_hopeless, has_progress=False, rung="fail")
    if not may_reconnect:
        return take_lower_rung(job, event.at_s, Reason("switched-off", "connecting again is switched off (rungs)"))
    if times > job.settings.max_reconnects:
        how_often = {2: "once", 3: "twice"}.get(times, f"{times - 1} times")
        return take_lower_rung(
            job,
            event.at_s,
            Reason(
                "same-fault-again",
                f"the connections broke {times} times in step {event.boundary}: reconnecting {how_often} did not help",
            ),
        )
    return begin_attempt(job, event.at_s)


def lose_to_device(job: Job, event: ConnectionBroken, member: Member) -> Result:
    """A rank's device cannot restore its links: the rank gets a new process, which makes new ones.

    member   the rank that has reported the event
    """
    lost = RankExited(
        at_s=event.at_s,
        rank=member.rank,
        pid=member.pid or 0,
        code=None,
        signal=None,
        boundary=event.boundary,
        detected_after_s=event.detected_after_s,
        device_fault=event.device_fault,
        reason=f"connecting again has not helped: {event.reason}",
    )
    job, actions = answer_fault(job, lost)
    return job, (KillRank(member.rank, lost.sentence), *actions)


def on_connection_broken_again(job: Job, event: ConnectionBroken) -> Result:
    """RESUMING: the new connections have broken too: another attempt, if one is left.

    If a rank's device cannot restore its links, that rank gets a new process.
    """
    if event.rank is not None and job.incident is not None and not job.finished and "replace" in job.settings.rungs:
        return lose_to_device(job, event, job.members[event.rank])
    return try_again(job, event.at_s, Reason(text=event.sentence), "connect anew")


def on_mismatch(job: Job, event: MismatchFound) -> Result:
    """A check has failed: a new process would fail too, unless this one's earlier run of the script is to blame.

    If the check is a replacement's, the replacement is given up. What differs by rounding alone may be other in the
    next one, which is no attempt that has failed: ranks count how often they have tried.
    """
    member = job.members[event.rank]
    if event.is_near and member.life is RankState.LOST and "replace" in job.settings.rungs:
        return try_again(job, event.at_s, event.why, "repair it", is_free=True)
    if member.life is RankState.LOST and not member.is_rerun:
        return give_up_replacing(job, event.at_s, event.why, is_replayable=not event.is_contradiction)
    if not (member.is_rerun and member.has_orders and "replace" in job.settings.rungs):
        return give_up_on_mismatch(job, event)
    again = event.why.within(f"{event.why} when it ran the script again")
    return try_again(job, event.at_s, again, "repair it")


def try_again(job: Job, at_s: float, fault: Reason, what_for: str, is_free: bool = False) -> Result:
    """Another attempt, if one is left, though no process has been lost.

    fault      completes "..., then"
    what_for   completes "attempts to"
    is_free    it does not count
    """
    attempt = 0 if is_free else 1
    if job.incident is None:  # all were frozen only for a checkpoint
        job = open_incident(job, at_s, "connection", str(fault), detect_s=0.0)
    else:
        attempt += job.incident.attempt
        job = add_fault(job, str(fault))
    if job.finished:
        return drain(
            job,
            at_s,
            Reason(
                "ranks-have-finished", f"{name_ranks(job.finished)} finished before, so the group cannot be built again"
            ),
        )
    if attempt > job.settings.max_attempts:
        said = f"{job.settings.max_attempts} attempts to {what_for} failed, the last one in {job.phase}"
        return take_lower_rung(
            job, at_s, fault.within(said) if fault.kind else Reason("recovery-failed", said), is_refusal=False
        )
    return begin_attempt(job.with_incident(attempt=attempt), at_s)


def on_renewed_in_repair(job: Job, event: SupervisorRenewed) -> Result:
    """Another attempt, if one is left: with new processes where those that were requested have not been seen.

    The job itself is whole: it is what the recorded events come to. But some orders of the newest event may not have
    been carried out. So what was going on is ordered again; in RUNNING that is nothing.
    """
    job = with_spawns_forgotten(job)
    if job.ending is not None:  # all have resumed only to end by themselves
        return begin_persisting(job, event.at_s)
    return try_again(job, event.at_s, why_renewed(event), "repair the job")


def with_spawns_forgotten(job: Job) -> Job:
    """The job without the requests for processes that have not come yet."""

    def change(member: Member) -> Member:
        is_waiting = member.pid is None and member.spawn_asked_at_s is not None
        return replace(member, spawn_asked_at_s=None) if is_waiting else member

    return replace(job, members=job.members.with_each(change))


def why_renewed(event: SupervisorRenewed) -> Reason:
    """What has failed, for the operator."""
    return Reason("ttprun-error", f"ttprun's supervisor failed and was made anew ({event.reason})")


def on_renewed(job: Job, event: SupervisorRenewed) -> Result:
    """No repair goes on: what was ordered last is ordered again, as the agent may not have heard it."""
    why = why_renewed(event)
    match job.phase:
        case JobPhase.PERSISTING:  # all quiesce again, and write
            return begin_persisting(job, event.at_s)
        case JobPhase.DRAINING:  # the deadline for ranks that may finish begins again
            return enter(job, JobPhase.DRAINING, event.at_s, (deadline_of(job, JobPhase.DRAINING),))
        case JobPhase.RESTARTING:
            return job, (RestartGroup(why if job.incident is None else job.incident.reason),)
        case JobPhase.DONE:
            return job, (FinishJob(),)
        case _:
            return job, (FailJob(why if job.ending is None else job.ending.reason),)
