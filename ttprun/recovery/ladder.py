"""The rungs: another attempt to replace or reconnect, rewind, restart, draining, the end.

Each function takes the job, and returns it in its new phase with the actions that this needs. Every lower rung has a
reason for the operator: why it is taken, and the first fault.
"""

from __future__ import annotations

from dataclasses import replace

from ttprun.protocol.process_orders import Action, KillRank, SpawnRank
from ttprun.protocol.rank_events import MismatchFound
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Freeze
from ttprun.recovery.alone import as_own
from ttprun.recovery.job import RUNGS, Ending, Job, JobPhase
from ttprun.recovery.job_events import Saved, name_ranks
from ttprun.recovery.members import Member
from ttprun.recovery.phases import (
    HALT,
    UNDONE,
    FailJob,
    FinishJob,
    NoteUnusable,
    Persist,
    Regroup,
    RestartGroup,
    Result,
    SetDeadline,
    begin_rewind,
    deadline_of,
    enter,
    go_back,
    open_incident,
    reason_of,
    what_sends_back,
    why_no_rewind,
)
from ttprun.recovery.state_origins import (
    ANEW,
    FROM_TOP,
    NOTHING_LEFT,
    Refusal,
    in_memory,
    may_rewind,
    on_disk,
    plan,
    steps_reached,
    why_no_restart,
    why_no_source,
)


def begin_attempt(job: Job, at_s: float) -> Result:
    """Rung "replace": a new generation; survivors freeze, and each lost rank gets a process.

    If every lost rank still has its own process it is rung "rerun", and nothing is spawned. If no rank is lost it is
    rung "reconnect": the survivors freeze and reconnect. If ranks that were away come back it is rung "resize".

    A replacement's process that has had no orders yet is kept, also one that is being started. One that has had orders
    is replaced: it may be anywhere between the top of the script and the boundary. If no survivor is left during a
    rewind, all rewind again. If no other rank holds a lost rank's state, all rewind.
    """
    if job.back_to is not None and (not job.survivors or why_no_source(job, job.lost, job.survivors)):
        return begin_rewind(job, at_s)
    job = replace(job, generation=job.generation + 1)
    spawns: list[Action] = []
    lost: list[Member] = []
    for member in job.replacements:
        if member.needs_process and member.pid is not None:
            spawns.append(KillRank(member.rank, f"the repair begins again as generation {job.generation}"))
            member = replace(member, pid=None, is_rerun=False, is_protected=False)
        if member.pid is None and member.spawn_asked_at_s is None:
            spawns.append(SpawnRank(member.rank, job.generation))
            member = replace(member, spawn_asked_at_s=at_s)
        lost.append(member)
    job = replace(job, members=job.members.with_changed(lost).with_each(Member.with_answers_forgotten))
    actions = (Freeze(job.survivors, job.generation, job.lost), *spawns, deadline_of(job, JobPhase.FREEZING))
    job = replace(job, back_to=None, leaving=())
    rung = "replace" if any(not member.is_rerun for member in job.replacements) else "rerun"
    rung = "resize" if job.is_upgrading else rung if job.lost else "reconnect"
    return enter(job, JobPhase.FREEZING, at_s, actions, rung=rung, **UNDONE)


def drain(job: Job, at_s: float, why: Reason) -> Result:
    """No repair is possible, but ranks still run: those that do not need the lost ones may finish before the restart.

    Ranks that do need them wait in a collective that will never complete, hence the deadline.

    at_s   time of the event, monotonic
    why    no repair is possible, for the operator
    """
    if not job.survivors:
        return take_lower_rung(job, at_s, why) if job.lost else finish_job(job, at_s)
    reason = reason_of(job, why)
    useless = tuple(member for member in job.replacements if member.pid is not None)
    job = job.with_members(*(replace(member, pid=None, is_rerun=False, is_protected=False) for member in useless))
    kills = (KillRank(member.rank, f"it is no longer needed: {why}") for member in useless)
    return enter(
        job, JobPhase.DRAINING, at_s, (*kills, deadline_of(job, JobPhase.DRAINING)), rung="restart", reason=reason
    )


def take_lower_rung(
    job: Job, at_s: float, why: Reason, is_refusal: bool = True, is_trusted: bool = True, is_replayable: bool = True
) -> Result:
    """All ranks get new processes: rung "rewind" if there is a snapshot, else "restart"; else the job ends.

    is_refusal      in a rewind: a check has refused it, and would do so again; False: processes were lost
    is_trusted      False: the living ranks' state may be wrong
    is_replayable   False: a replay of the script has differed from the run; all ranks resume from a stored state only
                    if they can be compared with what they have left of the step that follows it
    """
    if job.incident is None:
        job = open_incident(job, at_s, "checkpoint", "all waited for a checkpoint", detect_s=0.0)
    job = job if is_replayable or job.is_resumed else replace(job, is_contradicted=True)
    if job.count("without node"):  # they cannot have processes
        return leave_group(replace(job, back_to=None), at_s, why, is_trusted)
    if job.back_to is not None:
        return leave_way_back(job, at_s, why, is_refusal)
    return go_to_stored(job, at_s, why, is_trusted)


def go_to_stored(job: Job, at_s: float, why: Reason, is_trusted: bool) -> Result:
    """All ranks, or the one that is alone, get new processes, and the best that outlives theirs; else they end.

    why, is_trusted   as for `take_lower_rung`; without a reason: that nothing better is left
    """
    given = plan(job, (*in_memory(job), FROM_TOP), job.settings.rungs - {"restart"})
    if isinstance(given, Refusal):
        return leave_group(job, at_s, why or given.why, is_trusted)
    origin = next(iter(given.values()))
    if origin.place == "snapshot":
        why_hopeless = why_no_rewind(job, origin.stored) or why_too_many_incidents(job)
        if why_hopeless:
            return fail_job(job, at_s, why_hopeless.within(f"{why_hopeless}: {why}"), has_progress=False, rung="fail")
        job = replace(job, rewinds=(*job.rewinds, what_sends_back(job, origin.stored)))
    elif steps_reached(job):
        why = why or origin.why or NOTHING_LEFT
        why = why.within(f"{why}; it starts anew")
    return go_back(job, at_s, origin.stored, reason_of(job, why))


def leave_way_back(job: Job, at_s: float, why: Reason, is_refusal: bool) -> Result:
    """Resuming from a stored state has failed: use the next older one, or the script's top.

    at_s         time of the event, monotonic
    why          it has failed, for the operator
    is_refusal   a check has refused the state, and would do so again; False: processes were lost on the way
    """
    failed = job.back_to or ANEW
    job = replace(job, back_to=None)
    if not job.is_resumed:  # why all have gone back is void: only why they could not counts
        job = job.with_incident(reason=Reason(text=job.cause))
    if failed == ANEW:
        return leave_group(job, at_s, why.within(f"starting anew failed: {why}"))
    if job.is_growing and failed.place:
        job = replace(job, is_growing=False, is_contradicted=False)
        reason = reason_of(job, why.within(f"{why}; the nodes that came last leave"))
        return regroup(job, at_s, failed, reason, is_back=True)
    is_trusted = not job.is_contradicted  # else some have come to their places with other variables
    if not failed.place:
        why = why.within(f"going back to the snapshot of step {failed.boundary} failed: {why}")
        job = replace(job, in_memory=tuple(saved for saved in job.in_memory if saved != failed))
        return go_to_stored(job, at_s, why, is_trusted)
    note = NoteUnusable(failed.place, str(why), is_refusal)
    job = replace(job, saved=tuple(saved for saved in job.saved if saved != failed))
    why = why.within(f"the run cannot resume from the checkpoint of step {failed.boundary}: {why}")
    whole = why if job.is_resumed else reason_of(job, why)
    given = plan(job, (*on_disk(job), FROM_TOP) if job.is_resumed else on_disk(job), RUNGS)
    if not is_refusal:
        why = why.within(f"{why}; its state is still saved: {failed.place}")
        job, actions = fail_job(job, at_s, why, rung="fail")
    elif not isinstance(given, Refusal):
        to = given[0].stored
        how = "no other can be used, so the script starts anew"
        how = f"all resume from the one of step {to.boundary}" if to.place else how
        job, actions = go_back(job, at_s, to, whole.within(f"{whole}; {how}"))
    elif job.is_resumed:
        why = why.within(f"{why}; {given.why}")
        job, actions = fail_job(job, at_s, why, has_progress=False, rung="fail")
    else:
        job, actions = leave_group(job, at_s, why, is_trusted)
    return job, (note, *actions)


def leave_group(job: Job, at_s: float, why: Reason, is_trusted: bool = True, goes_on: bool = True) -> Result:
    """Rung "restart": from the state saved now or earlier; otherwise from the top; otherwise the job ends.

    at_s         time of the event, monotonic
    why          the rungs above do not help, for the operator
    is_trusted   False: the living ranks' state may be wrong: it is not saved, and no saved state is resumed from
    goes_on      False: a run that resumes from the saved state would come to the same end

    Resuming from a saved state is not counted as a restart, but ends if it brings no progress, or by the limit for
    incidents of one kind. If the script itself resumes from a framework's checkpoint, that is saved first. With
    "restart" and "persist" switched off, the job ends.
    """
    has_progress, settings = True, job.settings
    ending_rung = "restart" if "restart" in settings.rungs else "fail"
    why_not = why_no_restart(job)
    is_compared = not (job.is_contradicted and settings.is_elastic)  # other ranks have nothing to be compared with
    goes_on = goes_on and is_trusted and is_compared and {"restart", "persist"} <= settings.rungs
    goes_on = goes_on and not (settings.saves_before_restart or job.finished or job.hindrance)
    why_too_often = why_too_many_incidents(job) if goes_on else Reason()
    if why_too_often:
        goes_on, has_progress, why_not = False, False, why_too_often
    ending = Ending(
        reason=reason_of(job, (why if why.kind else why_not).within(f"{why}; {why_not}") if why_not else why),
        has_progress=has_progress,
        rung=ending_rung,
        is_restart=not why_not,
        goes_on=goes_on,
        is_replayable=goes_on or not job.is_contradicted,
        why=reason_of(job, why),
    )
    stands_at_start = job.source is not None and job.source.boundary == 0
    is_of_use = (goes_on and not stands_at_start) or not ending.is_restart or settings.saves_before_restart
    return end_with(job, at_s, ending, is_trusted and is_of_use)


def end_with(job: Job, at_s: float, ending: Ending, is_saved: bool = True) -> Result:
    """The job, or its processes, end so, after its state has been written if that is possible, and wanted."""
    job = replace(job, ending=ending)
    return begin_persisting(job, at_s) if is_saved and not why_not_saved(job) else end_job(job, at_s)


def why_too_many_incidents(job: Job) -> Reason:
    """Why there were too many incidents of the open one's kind; "" if there were not."""
    limit = job.settings.max_incidents_per_hour
    kind = job.incident.kind if job.incident is not None else ""
    alike = sum(opening.kind == kind for opening in job.openings)
    if limit is not None and alike > limit:
        return Reason(
            "same-fault-again",
            f"there were {alike} incidents of the kind '{kind}' within an hour (max_incidents_per_hour)",
        )
    return Reason()


def finish_job(job: Job, at_s: float) -> Result:
    """All scripts have reached their end."""
    return enter(job, JobPhase.DONE, at_s, (FinishJob(),), outcome="recovered", steps_lost=0)


def fail_job(
    job: Job, at_s: float, why: Reason, has_progress: bool = True, rung: str = "", is_fault: bool = True
) -> Result:
    """The job ends, after its state has been written if that is possible.

    rung       of the open incident, "" to leave it
    is_fault   False: the user or the scheduler ends it
    """
    reason = reason_of(job, why) if is_fault else stopped_by(job, why)
    return end_with(job, at_s, Ending(reason=reason, has_progress=has_progress, is_fault=is_fault, rung=rung))


def stopped_by(job: Job, why: Reason) -> Reason:
    """Who ends the job; and what was being repaired when that came."""
    if job.incident is None:
        return why
    before = job.incident.reason
    return Reason(before.kind, f"{why}; before that: {before}", why.text)


def end_job(job: Job, at_s: float) -> Result:
    """End the job, or the current processes, as `job.ending` says; or all resume from the newest saved state."""
    ending = job.ending
    assert ending is not None
    given = plan(job, on_disk(job) if ending.goes_on and not job.finished else (), RUNGS)
    if not isinstance(given, Refusal):
        newest = given[0].stored
        if job.went_back_to is None or newest.boundary > job.went_back_to:
            why = ending.why.within(f"{ending.why}; all resume from the state saved at step {newest.boundary}")
            is_without_node = job.count("without node")
            return regroup(job, at_s, newest, why) if is_without_node else go_back(job, at_s, newest, why)
        why = ending.reason.within(f"{ending.reason}; no step completed since the restart at step {job.went_back_to}")
        ending = replace(ending, reason=why, has_progress=ending.has_progress and ending.is_restart)
    if ending.is_restart and job.settings.is_elastic:
        return regroup(job, at_s, ANEW, ending.reason)
    if ending.is_restart:
        actions = (RestartGroup(ending.reason),)
        return enter(
            replace(job, ending=None), JobPhase.RESTARTING, at_s, actions, rung="restart", reason=ending.reason
        )
    order = FailJob(ending.reason, ending.has_progress)
    changes = {"rung": ending.rung} if ending.rung else {}
    return enter(job, JobPhase.FAILED, at_s, (order,), outcome="failed", reason=ending.reason, **changes)


def regroup(job: Job, at_s: float, to: Saved, why: Reason, is_back: bool = False) -> Result:
    """Rung "resize": all ranks end, and the group starts again on the nodes that are there.

    to        what they resume from; boundary 0: they run the script from its top
    is_back   without the nodes that came last, which cannot take part
    """
    order = Regroup(to.place, to.boundary, why, is_back)
    rung = "resize" if to.place else "restart"
    return enter(replace(job, ending=None), JobPhase.RESTARTING, at_s, (order,), rung=rung, reason=why)


def why_not_saved(job: Job) -> Reason:
    """Why the ranks cannot be made to write a checkpoint now; "" if they can."""
    if job.phase in (JobPhase.PERSISTING, JobPhase.RESTARTING, JobPhase.DONE, JobPhase.FAILED):
        return Reason(text=f"the job is {job.phase}")
    if "persist" not in job.settings.rungs:
        return Reason("switched-off", "saving is switched off (rungs)")
    if job.are_alone or (job.settings.is_alone and job.settings.world_size > 1):
        return Reason(
            "survivors-disagree", "the ranks train without a process group, each for itself, and have no common step"
        )
    if job.unprotected_reason:
        return job.unprotected_reason
    if job.incident is not None and job.incident.kind == MismatchFound.kind:
        return Reason("other-weights", "the ranks hold state that contradicts each other's")
    if job.finished or not holds_state(job):
        return Reason("ranks-have-finished", f"{name_ranks(job.finished or job.lost)} no longer trains")
    silent = tuple(rank for rank in job.survivors if not job.members[rank].is_protected)
    return Reason("no-step-yet", f"the hooks of {name_ranks(silent)} have not reported yet") if silent else Reason()


def holds_state(job: Job) -> bool:
    """Whether a rank lives that can write its state, or else what lost ranks have left in shared memory can be."""
    return bool(job.survivors or job.in_memory)


def begin_persisting(job: Job, at_s: float) -> Result:
    """Rung "persist": the living ranks quiesce, and then write their state; replacements are killed.

    If no rank lives, what is kept of them in shared memory is written.
    """
    job = replace(job, generation=job.generation + 1, persists_at=None, back_to=None)
    useless = tuple(member for member in job.replacements if member.pid is not None)
    job = job.with_members(*(replace(member, pid=None, is_rerun=False, is_protected=False) for member in useless))
    job = replace(job, members=job.members.with_each(Member.with_answers_forgotten))
    kills = (KillRank(member.rank, "the job ends before it has caught up") for member in useless)
    if not job.survivors and job.in_memory:
        newest = job.in_memory[0]
        job = replace(job, persists_at=newest.boundary)
        order = Persist((), job.generation, newest.boundary, "dying gasp", newest.is_own)
        return enter(job, JobPhase.PERSISTING, at_s, (*kills, order, deadline_of(job, JobPhase.PERSISTING)))
    deadline = SetDeadline(job.generation, HALT, job.settings.limits.halt_s)
    return enter(job, JobPhase.PERSISTING, at_s, (Freeze(job.survivors, job.generation, job.lost), *kills, deadline))


def cost_of_a_loss(job: Job) -> str:
    """Completes "if a rank is lost, ", for a job whose ranks cannot be replaced."""
    if may_rewind(job):
        return f"all ranks go back to the snapshot of step {job.snapshot}, and the steps since then are lost"
    if not why_no_restart(job):
        return "all ranks start again from the top of the script, and what it has not saved itself is lost"
    # Else no launch could resume from what is saved: no replay reaches it, or the lost rank's own part is missing.
    if not why_not_saved(job) and not job.hindrance and not job.replicas.needs_snapshots:
        return "the job ends once its state is saved"
    return (
        "the job ends, and what the script has not saved itself is lost (with --max-restarts N all ranks would start "
        "again from its top)"
    )


def cost_of_a_loss_alone(job: Job, rank: int, every_s: float | None, kept: int | None = None) -> str:
    """Completes "if rank 1 is lost, ", for a rank that is alone.

    every_s  seconds between two states that it keeps of itself; 0: it keeps one after each step; None: it keeps none
    kept     boundary of one that it has kept before
    """
    if every_s is None and kept:
        return f"it alone goes back to its step {kept}, and its steps since are lost"
    if every_s is None:
        if job.settings.world_size == 1:
            return f"it goes back to its snapshot of step {job.snapshot}" if may_rewind(job) else cost_of_a_loss(job)
        may_begin_anew = "rewind" in job.settings.rungs and not as_own(job, rank).members[rank].has_joined
        return "it alone begins anew, and its steps are lost" if may_begin_anew else cost_of_a_loss(job)
    if every_s:
        return f"it alone goes back to the newest such state, one every {every_s:.1f} s, and loses its steps since"
    return "it alone is replaced, and loses no step: it keeps one after each"
