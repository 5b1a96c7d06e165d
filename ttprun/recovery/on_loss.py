"""Handlers of faults: what an exit, a stop or a restart means in each phase, and whether ranks can be replaced.

Read `answer_fault` first: its order of questions is the policy.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from ttprun.protocol.from_rank import RankFaulted, RankUnprotected
from ttprun.protocol.process_orders import KillRank
from ttprun.protocol.rank_events import MismatchFound, RankExited, RankStarted, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import NOBODY, Ending, FaultIdentity, Job, JobPhase, fresh_members
from ttprun.recovery.job_events import (
    GroupRestarted,
    NodeLost,
    RankDiverged,
    RankHung,
    RanksCompared,
    StepDiffers,
    name_ranks,
)
from ttprun.recovery.ladder import (
    begin_attempt,
    drain,
    end_job,
    end_with,
    fail_job,
    finish_job,
    take_lower_rung,
    why_too_many_incidents,
)
from ttprun.recovery.members import RankState
from ttprun.recovery.on_leave import end_drain, give_up_replacing, let_others_finish, mark_finished
from ttprun.recovery.phases import (
    CONNECTION,
    RESUME,
    Result,
    add_fault,
    count_as_incident,
    enter,
    open_incident,
    reason_of,
    unchanged,
)
from ttprun.recovery.repair import end_resuming, note_process
from ttprun.recovery.replicas import UNKNOWN
from ttprun.recovery.state_origins import NO_REPLACEMENT, why_no_restart, why_no_source

OF_SCRIPT = Reason("same-fault-again", "this is an error of the script itself")
NO_MEMORY = Reason("same-fault-again", "this machine had no memory left for it")
AGAIN = Reason("same-fault-again", "the script fails again in a new process")
CRASH = Reason("same-fault-again", "a new process crashes in the same line of the same step")
BY_PEER = {"device-lost", "remote-suspect"}  # what a GPU's error is, by its text, if the memory of a peer has gone
OF_PEER_MEMORY = (
    "perhaps as a killed rank's memory was gone, which its GPU was using: if this comes again, set NCCL_NVLS_ENABLE=0, "
    "and if that does not help NCCL_P2P_DISABLE=1"
)
LossEvent = RankExited | RankFaulted | RankHung | RankDiverged | NodeLost


def on_unprotected(job: Job, event: RankUnprotected) -> Result:
    """Replacement is off from now on; the first reason is kept."""
    return replace(job, unprotected_reason=job.unprotected_reason or as_of_job(event)), ()


def on_unprotected_in_repair(job: Job, event: RankUnprotected) -> Result:
    """The repair cannot be completed."""
    job, _ = on_unprotected(job, event)
    return take_lower_rung(job, event.at_s, as_of_job(event))


def on_compared(job: Job, event: RanksCompared) -> Result:
    """Store which ranks are replicas of each other, by the newest comparison."""
    return replace(job, replicas=event.replicas), ()


def on_compared_in_repair(job: Job, event: RanksCompared) -> Result:
    """The repair continues only if each lost rank still has a source."""
    job, _ = on_compared(job, event)
    why_not = why_no_source(job, job.lost, job.quiesced) if job.back_to is None else Reason()
    return take_lower_rung(job, event.at_s, why_not) if why_not else (job, ())


def as_of_job(event: RankUnprotected) -> Reason:
    """The reason why no rank can be replaced, with the rank that gave it."""
    return event.reason.within(f"rank {event.rank} is not protected ({event.reason})")


def on_exit(job: Job, event: RankExited) -> Result:
    """RUNNING: a rank has finished, or is lost."""
    if not event.is_finish:
        return answer_fault(job, event)
    job = mark_finished(job, event)
    if job.count("live"):
        return job, ()
    return finish_job(job, event.at_s)


def on_exit_in_repair(job: Job, event: RankExited) -> Result:
    """A survivor or a replacement has ended before the repair was complete."""
    member = job.members[event.rank]
    is_replacement = member.life is RankState.LOST
    if event.is_finish and is_replacement:
        return take_lower_rung(
            job,
            event.at_s,
            Reason(
                "other-place",
                f"the replacement of rank {event.rank} reached the end of the script before it had caught up",
            ),
            is_replayable=False,
        )
    if event.is_finish and member.has_reissued:
        return end_resuming(mark_finished(job, event), event.at_s)
    if event.is_finish:
        return let_others_finish(job, event)
    is_new_process = is_replacement and not (member.is_rerun or event.is_of_worker)
    if is_new_process and event.crashed_at and is_known(job, event):
        return fail_for_good(note_fault(job, event), event)
    if is_new_process and is_of_script(event.kind) and is_known(job, event):
        fault = identity_of(event)
        job = replace(job, faults=(*job.faults, fault))
        is_left = job.faults.count(fault) <= job.settings.exception_retries
        if not (is_left and job.phase is JobPhase.RESUMING):
            return fail_for_good(note_fault(job, event), event)
    elif event.is_script_error and is_new_process:
        job = note_fault(job, event)
        return give_up_replacing(
            job,
            event.at_s,
            Reason(
                "not-replayable",
                f"the script failed in the replacement of rank {event.rank} while the job was {job.phase}",
            ),
            is_replayable=False,
        )
    return answer_fault(job, event)


def on_faulted(job: Job, event: RankFaulted) -> Result:
    """The script of a rank has ended, and its process could run it again, once in a repair.

    An error that comes back in a new process is not transient.
    """
    member = job.members[event.rank]
    if member.life is RankState.LOST and not member.is_rerun and is_known(job, event):
        return fail_for_good(note_fault(job, event), event)
    is_kept = may_rerun(job, event.rank)
    job, actions = answer_fault(job, event)
    return job, actions if is_kept else (KillRank(event.rank, event.sentence), *actions)


def is_known(job: Job, event: LossEvent) -> bool:
    """Whether the same fault has opened this incident or an earlier one."""
    return identity_of(event) in job.faults


def identity_of(event: LossEvent) -> FaultIdentity:
    """What must be alike in a fault that comes back."""
    crashed_at = event.crashed_at if isinstance(event, RankExited) else ""
    return FaultIdentity(rank=event.rank, kind=event.kind, boundary=event.boundary, crashed_at=crashed_at)


def fail_for_good(job: Job, event: LossEvent) -> Result:
    """The script has failed in a new process as it had in the old one; a restart that is left is used, as by torchrun.

    If another fault opened the incident, the script's error may follow from it: a server process that died with its
    rank, say. Then that is the cause, and the script is not blamed.
    """
    is_of_incident = job.incident is not None and not is_of_script(job.incident.kind)
    again = CRASH if isinstance(event, RankExited) and event.crashed_at else AGAIN
    if not why_no_restart(job):
        why = reason_of(job, again)
        return end_with(job, event.at_s, Ending(reason=why, rung="restart", is_restart=True, why=why))
    why = again if is_of_incident else NO_MEMORY if event.reason.startswith("MemoryError") else OF_SCRIPT
    return fail_job(job, event.at_s, why, has_progress=False, rung="fail")


def is_of_script(kind: str) -> bool:
    """Whether the script itself has ended a process: by an exception, or with an exit code."""
    return kind == "exception" or kind.startswith("exit ")


def is_of_script_alone(event: LossEvent) -> bool:
    """Whether an exception or an exit code is the script's doing: nothing from outside, and no error of a device.

    A code above 128 is a shell's, which reports so that a signal has ended what it ran.
    """
    is_exit = isinstance(event, RankExited) and event.code is not None and event.code <= 128 and not event.device_fault
    return event.is_script_error or is_exit


def may_rerun(job: Job, rank: int) -> bool:
    """Whether a process that survives a fault of its script is kept, to run it again."""
    return "rerun" in job.settings.rungs and job.members[rank].life is RankState.LIVE


def on_faulted_while_draining(job: Job, event: RankFaulted) -> Result:
    """No repair is possible, so its process waits for nothing."""
    kill = KillRank(event.rank, "no repair is possible any more")
    job = note_fault(job, event).with_member(event.rank, pid=None, is_rerun=False)
    job, actions = end_drain(job, event.at_s)
    return job, (kill, *actions)


def on_exit_while_draining(job: Job, event: RankExited) -> Result:
    """One rank less to wait for; after the last one the group is restarted, unless all have finished."""
    return end_drain(mark_finished(job, event) if event.is_finish else note_fault(job, event), event.at_s)


def on_node_lost(job: Job, event: NodeLost) -> Result:
    """A node is gone with all of its ranks: they are replaced on another one. Those that have finished are not lost.

    What the node kept in its memory is gone too: there is no way back to a snapshot.
    """
    lost = tuple(rank for rank in event.ranks if job.members[rank].life in (RankState.LIVE, RankState.LOST))
    if not lost:
        return unchanged(job, event)
    job = replace(without_nodes(job, lost), in_memory=())
    event = structs.replace(event, ranks=lost)
    if job.alone or job.count("trains alone"):
        return take_lower_rung(
            note_fault(job, event),
            event.at_s,
            Reason("no-survivor", "ranks that train without a process group are repaired on their own node only"),
        )
    return answer_fault(job, event)


def on_node_lost_while_draining(job: Job, event: NodeLost) -> Result:
    """Some ranks less to wait for."""
    lost = tuple(rank for rank in event.ranks if job.members[rank].life in (RankState.LIVE, RankState.LOST))
    if not lost:
        return unchanged(job, event)
    job = note_fault(without_nodes(job, lost), structs.replace(event, ranks=lost))
    return end_drain(job, event.at_s)


def without_nodes(job: Job, ranks: tuple[int, ...]) -> Job:
    """These ranks have no node: a process that was requested for them will not start."""
    return job.with_members(
        *(replace(job.members[rank], spawn_asked_at_s=None, is_without_node=True) for rank in ranks),
    )


def on_started_in_vain(job: Job, event: RankStarted) -> Result:
    """A replacement that was still being started is not needed any more; any other rank starts late."""
    job = note_process(job, event)
    member = job.members[event.rank]
    if member.life is not RankState.LOST:
        return job, ()
    return job.with_member(event.rank, pid=None), (KillRank(event.rank, "no repair is possible any more"),)


def on_mismatch_in_running(job: Job, event: MismatchFound) -> Result:
    """Replicas differ, and it is not known which is right."""
    job = open_incident(job, event.at_s, event.kind, str(event.why), detect_s=0.0)
    job = job.with_incident(ranks=(event.rank,), reason=event.why)
    return take_lower_rung(
        job, event.at_s, Reason("other-weights", "the state of the ranks cannot be trusted"), is_trusted=False
    )


def on_step_differs(job: Job, event: StepDiffers) -> Result:
    """RUNNING: what a rank has computed wrongly is in all ranks by now: all go back to before that, in new processes.

    There is a snapshot of that step's beginning, as none is taken while it is verified. On several nodes there is none,
    and no rank has taken that step: the others save what they hold, and all go back to that.
    """
    job = replace(open_incident(job, event.at_s, event.kind, event.sentence, detect_s=0.0), stood_at=event.boundary)
    job = job.with_incident(ranks=(event.rank,), reason=Reason("other-weights", event.sentence))
    if not event.is_before:
        return take_lower_rung(job, event.at_s, Reason(), is_trusted=False)
    job = job.with_member(event.rank, pid=None, life=RankState.LOST, is_protected=False)
    job, actions = take_lower_rung(job, event.at_s, Reason(text="what it gave is in all gradients of that step"))
    return job, (KillRank(event.rank, event.sentence), *actions)


def on_stop(job: Job, event: StopAsked) -> Result:
    """The job ends, in any phase."""
    return fail_job(job, event.at_s, Reason(text=event.reason), is_fault=False)


def on_group_restarted(job: Job, event: GroupRestarted) -> Result:
    """All processes are new: forget what was known about the old ones."""
    reason = reason_of(job, Reason(text="the agent restarted the whole group"))
    if job.phase is JobPhase.RESTARTING and job.incident is not None:
        reason = job.incident.reason
    job = replace(with_new_ranks(job), restarts=job.restarts + 1)
    return enter(job, JobPhase.RUNNING, event.at_s, outcome="restarted", rung="restart", reason=reason)


def with_new_ranks(job: Job) -> Job:
    """The job without what was known about its old processes."""
    return replace(
        job,
        generation=job.generation + 1,
        members=fresh_members(job.settings),
        alone={},
        unprotected_reason=Reason(),
        replicas=UNKNOWN,
        rewinds=(),
        in_memory=(),
        back_to=None,
        is_resumed=False,
        went_back_to=None,
        stood_at=None,
        persists_at=None,
    )


def answer_fault(job: Job, event: LossEvent, is_costly: bool = False) -> Result:
    """A rank is lost: replace it, or say why not. The order of the questions matters.

    is_costly   it counts as an attempt even where other losses of survivors do not: a deadline has passed

    An exception before the first step ends the job only if it is the first fault: survivors that are still making their
    process group raise one when a peer is lost.
    """
    is_rerun = isinstance(event, RankFaulted) and may_rerun(job, event.rank)
    is_going_back = job.back_to is not None and not {*job.survivors} - {*ranks_of(event)}
    needs_process = not is_rerun or any(member.needs_process for member in job.replacements)
    why_not = why_not_protected(job, needs_process and not is_going_back) or why_not_replayed(job, event)
    was_survivor = any(job.members[rank].life is RankState.LIVE for rank in ranks_of(event))
    is_first_fault = job.incident is None
    is_free = is_first_fault or (was_survivor and job.phase is JobPhase.FREEZING and not is_costly)
    attempt = (job.incident.attempt if job.incident else 1) + (0 if is_free else 1)
    phase = job.phase
    job = note_fault(job, event)
    at_s = event.at_s
    is_early = is_of_script_alone(event) and event.boundary == 0 and is_first_fault
    if is_early and (not why_not or why_no_restart(job)):
        why = reason_of(job, Reason(text=f"the script failed before its first step in rank {event.rank}"))
        return end_job(replace(job, ending=Ending(reason=why, rung="fail")), at_s)
    is_repair_on = not job.settings.rungs.isdisjoint(("rerun", "replace"))
    why_hopeless = why_it_does_not_help(job) if is_first_fault and is_repair_on else Reason()
    if why_hopeless in (OF_SCRIPT, CRASH):
        return fail_for_good(job, event)
    if why_hopeless:
        return fail_job(job, at_s, why_hopeless, has_progress=False, rung="fail")
    if why_not:
        return give_up_replacing(job, at_s, why_not)
    if job.finished:
        return drain(
            job,
            at_s,
            Reason(
                "ranks-have-finished", f"{name_ranks(job.finished)} finished before, so the group cannot be built again"
            ),
        )
    if job.settings.is_alone and job.back_to is None:
        return take_lower_rung(job, at_s, Reason())
    if not job.survivors and job.back_to is None:
        return take_lower_rung(job, at_s, Reason("no-survivor", "all ranks of the group were lost"))
    if attempt > job.settings.max_attempts:
        return give_up_replacing(
            job,
            at_s,
            Reason(
                "recovery-failed",
                f"{job.settings.max_attempts} attempts to replace {name_ranks(job.lost)} failed, the last in {phase}",
            ),
            is_refusal=False,
        )
    return begin_attempt(job.with_incident(attempt=attempt), at_s)


def why_not_protected(job: Job, needs_process: bool = True) -> Reason:
    """Why no rank of this job can be replaced; "" if they can.

    needs_process   some lost rank needs a new process; False: all of them are run again in their own
    """
    if needs_process and not job.settings.is_alone and "replace" not in job.settings.rungs:
        return NO_REPLACEMENT
    return job.unprotected_reason


def why_not_replayed(job: Job, event: LossEvent) -> Reason:
    """Why no replay would reach a lost rank's boundary; "" if one may, or need not."""
    if job.settings.is_alone and job.in_memory:
        return Reason()
    if event.boundary == 0 or job.back_to is not None:
        return Reason()
    return next(filter(None, (job.members[rank].hindrance for rank in ranks_of(event))), Reason())


def ranks_of(event: LossEvent) -> tuple[int, ...]:
    """The ranks that are lost by it."""
    return event.ranks if isinstance(event, NodeLost) else (event.rank,)


def why_it_does_not_help(job: Job) -> Reason:
    """Why the fault that has just opened an incident must not be repaired again; "" if it may.

    The same fault of the same rank at the same boundary will come back, after a restart of the group too; and the limit
    of incidents ends a job that would fail again and again for days.
    """
    newest = job.faults[-1]
    times = sum((past.rank, past.kind) == (newest.rank, newest.kind) for past in job.faults)
    if newest.crashed_at and newest in job.faults[:-1]:
        return CRASH
    if is_of_script(newest.kind):
        return OF_SCRIPT if times > job.settings.exception_retries else why_too_many_incidents(job)
    if times > job.settings.max_same_faults:
        where = f"in step {newest.boundary}"
        return Reason(
            "same-fault-again",
            f"rank {newest.rank} had the same fault {where} {times} times: another attempt would not help",
        )
    return why_too_many_incidents(job)


def note_fault(job: Job, event: LossEvent) -> Job:
    """The rank is lost: open an incident, or add the fault to the open one."""
    if isinstance(event, RankFaulted) and may_rerun(job, event.rank):
        job = job.with_member(event.rank, life=RankState.LOST, is_rerun=True, has_orders=False)
    else:
        lost = (job.members[rank] for rank in ranks_of(event))
        job = job.with_members(
            *(replace(member, pid=None, life=RankState.LOST, is_rerun=False, is_protected=False) for member in lost)
        )
    if job.incident is None:
        fault = identity_of(event)
        job = replace(job, faults=(*(past for past in job.faults if past.boundary == fault.boundary), fault))
        job = open_incident(job, event.at_s, event.kind, event.sentence, event.detected_after_s)
        return job.with_incident(ranks=ranks_of(event))
    if job.incident.kind == RESUME:
        job = count_as_incident(job, event.at_s, event.kind)
    assert job.incident is not None
    ranks = job.incident.ranks
    if job.incident.kind == CONNECTION and not ranks and isinstance(event, RankExited):
        return exit_as_cause(job, event)
    ranks = (*ranks, *(rank for rank in ranks_of(event) if rank not in ranks))
    sentence = f"{event.sentence} ({OF_PEER_MEMORY})" if has_used_peer_memory(job, event) else event.sentence
    return add_fault(job, sentence).with_incident(ranks=ranks)


def has_used_peer_memory(job: Job, event: LossEvent) -> bool:
    """Whether a GPU may have failed as it used the memory of a rank that was killed, whichever was seen first."""
    assert job.incident is not None
    said = f"{job.incident.reason} {event.sentence}"
    is_of_gpu = bool(BY_PEER & {job.incident.kind, event.kind}) and "CUDA error" in said
    return is_of_gpu and " was killed (" in said


def exit_as_cause(job: Job, event: RankExited) -> Job:
    """A rank's end outranks the connections that broke by it: the incident is that of the exit."""
    fault = identity_of(event)
    past = (earlier for earlier in job.faults if earlier.boundary == fault.boundary and earlier.rank != NOBODY)
    openings = (*job.openings[:-1], *(replace(opening, kind=event.kind) for opening in job.openings[-1:]))
    job = replace(job, faults=(*past, fault), openings=openings, cause=event.sentence)
    return job.with_incident(kind=event.kind, reason=Reason(text=event.sentence), ranks=ranks_of(event))
