"""Requests: replace healthy ranks, make the group smaller, or whole again; nodes that join or leave; and saved state.

A planned replacement is one like any other, whose lost ranks are alive until all stand still; ranks that come back are
replaced like lost ones. As no fault has led to it, it counts for none. Whatever speaks against it leaves the job as it
is.

PERSISTING: all living ranks quiesce at one boundary, as for a repair; then each writes a part of the state, and the
agent makes a checkpoint of the parts. If the job continues, they reconnect and issue their journals, as after a broken
link, so a checkpoint is possible at any moment. If the user ends the job and the script handles the signal, they resume
too, so that the script can act on it.

If nodes join or leave, the state is saved, and the group starts again on the nodes that are there. Until all ranks have
ended, the job can continue as it is: if the state cannot be saved, or a rank is lost meanwhile, the nodes stay.
`elastic_policy.py` decides which nodes there are. Begin with `on_resize_asked` and `on_checkpoint_asked`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from msgspec import structs

from ttprun.protocol.from_rank import RankFaulted, RankFrozen
from ttprun.protocol.process_orders import Action, KillRank, TakeBack
from ttprun.protocol.rank_events import Event, MismatchFound, RankEvent, RankExited, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Resume
from ttprun.recovery.job import Ending, Job, JobPhase
from ttprun.recovery.job_events import (
    CheckpointAsked,
    DeadlinePassed,
    DowngradeAsked,
    GroupResized,
    GroupRestarted,
    NodeLost,
    ReplacementAsked,
    ResizeAsked,
    ResumeAsked,
    Saved,
    SnapshotTaken,
    StatePersisted,
    StepDiffers,
    UpgradeAsked,
    name_ranks,
)
from ttprun.recovery.ladder import (
    begin_attempt,
    begin_persisting,
    end_job,
    holds_state,
    regroup,
    stopped_by,
    why_not_saved,
)
from ttprun.recovery.members import RankState
from ttprun.recovery.on_leave import begin_shrinking, let_others_finish, mark_finished, why_not_without
from ttprun.recovery.on_loss import (
    LossEvent,
    answer_fault,
    is_of_script,
    on_faulted,
    on_node_lost,
    ranks_of,
    why_not_protected,
    with_new_ranks,
    without_nodes,
)
from ttprun.recovery.phases import (
    DEADLINE_NAMES,
    HALT,
    GiveUpCheckpoint,
    GiveUpResize,
    NoteUnusable,
    Persist,
    Result,
    deadline_of,
    enter,
    go_back,
    open_incident,
    open_resume,
    unchanged,
)
from ttprun.recovery.repair import is_anyone_moving, why_survivors_disagree
from ttprun.recovery.state_origins import steps_reached, why_no_source


def why_not_replaceable(job: Job, ranks: tuple[int, ...], has_mirrors: bool = True) -> Reason:
    """Why these ranks cannot give their places to new processes now; "" if they can.

    ranks         at least one
    has_mirrors   their mirrors are there for the new processes; False: they go with their node
    """
    if job.are_alone:
        return Reason(
            "survivors-disagree",
            "the ranks train without a process group, so a new process could get its state from no rank",
        )
    strangers = tuple(rank for rank in ranks if rank not in job.survivors)
    if job.phase is not JobPhase.RUNNING:
        return Reason(text=f"the job is {job.phase}")
    if strangers or job.finished:
        return Reason("ranks-have-finished", f"{name_ranks(strangers or job.finished)} no longer trains")
    if not {*job.survivors} - {*ranks}:
        return Reason("no-survivor", "no rank would be left to repair the others from")
    remaining = tuple(rank for rank in job.survivors if rank not in ranks)
    if not has_mirrors:
        job = replace(job, replicas=replace(job.replicas, mirrored=job.replicas.mirrored - {*ranks}))
    return why_not_protected(job) or why_no_source(job, ranks, remaining)


def on_replacement_asked(job: Job, event: ReplacementAsked) -> Result:
    """RUNNING: all quiesce, as for a checkpoint, and `repair.replace_leaving` goes on. Nobody is lost until then.

    Another fault meanwhile is answered in its place.
    """
    if why_not_replaceable(job, event.ranks):
        return unchanged(job, event)
    job = open_incident(job, event.at_s, event.kind, event.sentence, detect_s=0.0)
    job, actions = begin_attempt(job, event.at_s)
    return replace(job, leaving=event.ranks, leaves_node=bool(event.node), keeps_old=event.is_kept), actions


OF_THE_PLAN = (JobPhase.REPLAYING, JobPhase.TRANSFERRING, JobPhase.RESUMING, JobPhase.RUNNING)


def keep_to_plan(job: Job, event: Event, answer: Result, handler: Callable[[Job, Any], Result]) -> Result:
    """Healthy ranks are being replaced, and their old processes are kept: see that nothing is lost if that fails.

    If the answer leads elsewhere than to the end of the replacement, it is void: the old processes get their places
    again, and all connect. Somebody else's fault is then answered as if nobody had been replaced.
    """
    after, _ = answer
    is_on_plan = after.generation == job.generation and after.phase in OF_THE_PLAN
    lost = {*job.lost} - {*(ranks_of(event) if isinstance(event, NodeLost) else ())}
    back = tuple(member for member in job.kept if member.rank in lost)
    if is_on_plan and after.phase is not JobPhase.RUNNING:
        return answer
    if is_on_plan or not back or isinstance(event, GroupRestarted | GroupResized):
        return replace(after, kept=()), answer[1]
    why = job.cause if after.incident is None else str(after.incident.reason)
    said = str(getattr(event, "sentence", "") or getattr(event, "reason", ""))
    why = why if said in why else f"{why}; not replaced: {said}"
    orders = tuple(TakeBack(member.rank, member.pid or 0, why) for member in back)
    job = replace(job.with_members(*back), kept=())
    job = job.with_incident(ranks=job.lost)
    is_own = isinstance(event, RankEvent) and event.rank in {member.rank for member in back}
    if isinstance(event, LossEvent | StopAsked) and not is_own:
        after, actions = handler(job, event)
    else:
        reason = f"{why}; the old process trains on"
        after, actions = begin_attempt(job.with_incident(reason=Reason(text=reason)), event.at_s)
    return after, (*orders, *actions)


def why_not_upgradable(job: Job) -> Reason:
    """Why the ranks that are away cannot come back now; "" if they can."""
    if not job.away:
        return Reason(text="no rank is away")
    if job.phase is not JobPhase.RUNNING:
        return Reason(text=f"the job is {job.phase}")
    if job.finished:
        return Reason("ranks-have-finished", f"{name_ranks(job.finished)} no longer trains")
    return why_not_protected(job, needs_process=False)


def on_upgrade_asked(job: Job, event: UpgradeAsked) -> Result:
    """RUNNING: the ranks that are away get processes, which are repaired like those of lost ranks.

    It is asked for, so that it needs no rung "replace".
    """
    if why_not_upgradable(job):
        return unchanged(job, event)
    ranks = job.away
    fault = f"{name_ranks(ranks)} had to come back ({event.reason})"
    job = job.with_members(*(replace(job.members[rank], life=RankState.LOST) for rank in ranks))
    job = open_incident(job, event.at_s, event.kind, fault, detect_s=0.0).with_incident(ranks=ranks)
    return begin_attempt(job, event.at_s)


def on_downgrade_asked(job: Job, event: DowngradeAsked) -> Result:
    """A repair continues without waiting for its replacements any more."""
    if not job.lost or why_not_without(job, job.lost):
        return unchanged(job, event)
    return begin_shrinking(job, event.at_s, Reason(text=event.reason))


KIND = "nodes"  # of an incident in which nothing has failed


def on_resize_asked(job: Job, event: ResizeAsked) -> Result:
    """Save the state, unless it cannot be saved now."""
    why_not = why_not_saved(job)
    if why_not:
        return job, (GiveUpResize(str(why_not)),)
    job = open_incident(job, event.at_s, KIND, event.reason, detect_s=0.0).with_incident(rung="resize")
    job = replace(job, ending=Ending(reason=Reason(text=event.reason), is_fault=False, rung="resize", is_resize=True))
    return begin_persisting(job, event.at_s)


def is_resizing(job: Job) -> bool:
    """The state is being saved because nodes join or leave."""
    return job.ending is not None and job.ending.is_resize


def keep_nodes(job: Job, why_not: str) -> tuple[Job, tuple[Action, ...]]:
    """The nodes stay: what waits for the saved state continues as it is."""
    if not is_resizing(job):
        return job, ()
    reason = Reason() if job.incident is None else job.incident.reason
    return replace(job, ending=None).with_incident(
        reason=reason.within(f"{reason}; the nodes stay as they are: {why_not}")
    ), (GiveUpResize(why_not),)


def unless_resizing(handler: Callable[[Job, Any], Result]) -> Callable[[Job, Any], Result]:
    """A handler of faults while the state is being saved; one that has a consequence comes before other nodes."""

    def answer(job: Job, event: Event) -> Result:
        kept, notes = keep_nodes(job, f"{type(event).__name__} while their state was being saved")
        after, actions = handler(kept, event)
        return (job, ()) if after == kept and not actions else (after, (*notes, *actions))

    return answer


def on_saved_to_resize(job: Job, event: StatePersisted, otherwise: Callable[[Job, str], Result]) -> Result:
    """The state is saved, and the group starts again; or it is not, and the nodes stay.

    otherwise   has all resume, given why nothing was saved
    """
    why_not = event.why_not or event.why_unusable
    if not event.place or why_not or job.persists_at is None:
        job, notes = keep_nodes(job, why_not or "nothing was saved")
        job, actions = otherwise(job, why_not or "nothing was saved")
        return job, (*notes, *actions)
    saved = Saved(job.persists_at, event.place)
    reason = Reason() if job.incident is None else job.incident.reason
    return regroup(replace(job, saved=(saved, *job.saved)), event.at_s, saved, reason)


def with_size(job: Job, world_size: int) -> Job:
    """The job with so many ranks, none of which has a process."""
    return with_new_ranks(replace(job, settings=replace(job.settings, world_size=world_size)))


def on_group_resized(job: Job, event: GroupResized) -> Result:
    """All ranks are being started, on other nodes: they resume, as those of a new launch would."""
    if not event.saved:
        job = replace(job, restarts=job.restarts + 1)
        return enter(job, JobPhase.RUNNING, event.at_s, outcome="restarted", rung="restart")
    if job.incident is None:  # another agent has led until now
        job = open_incident(job, event.at_s, KIND, event.reason, detect_s=0.0).with_incident(rung="resize")
    members = job.members.with_each(lambda member: replace(member, life=RankState.LOST, spawn_asked_at_s=event.at_s))
    job = replace(job, members=members, saved=event.saved, replicas=event.replicas, is_growing=event.has_grown)
    assert job.incident is not None
    after, actions = go_back(job, event.at_s, event.saved[0], job.incident.reason)
    if job.incident.kind == KIND:  # nothing has failed: a fault before the next step is the first one to go back for
        after = replace(after, went_back_to=job.went_back_to)
    return after, actions


def on_snapshot(job: Job, event: SnapshotTaken) -> Result:
    """There is a newer snapshot, or own state, to go back to, unless no replay could reach it."""
    if job.hindrance and not job.settings.is_alone:  # a rank that is alone keeps only what a replay can reach
        return job, ()
    other = (saved for saved in job.in_memory if saved.is_own != event.is_own)
    new = () if event.boundary is None else (Saved(event.boundary, is_own=event.is_own),)
    in_memory = tuple(sorted((*new, *other), key=lambda saved: -saved.boundary))
    return replace(job, in_memory=in_memory, rewinds=job.rewinds if in_memory == job.in_memory else ()), ()


def on_resume_asked(job: Job, event: ResumeAsked) -> Result:
    """A new launch resumes from a checkpoint: its ranks start as in a rewind, but their processes are being started."""
    newest = event.saved[0]
    members = job.members.with_each(lambda member: replace(member, life=RankState.LOST, spawn_asked_at_s=event.at_s))
    job = replace(job, members=members, saved=event.saved, is_resumed=True, replicas=event.replicas)
    why = f"a checkpoint of step {newest.boundary} was found ({newest.place})"
    return go_back(open_resume(job, event.at_s, why), event.at_s, newest, Reason(text=why))


def on_checkpoint_asked(job: Job, event: CheckpointAsked) -> Result:
    """The user requests a checkpoint now."""
    why_not = str(why_not_saved(job))
    return giving_up(job, why_not, unchanged(job, event)) if why_not else begin_persisting(job, event.at_s)


def on_frozen_to_persist(job: Job, event: RankFrozen) -> Result:
    """A rank is quiesced; when all are, they write."""
    member = job.members[event.rank]
    if member.life is not RankState.LIVE or member.frozen is not None or job.persists_at is not None:
        return unchanged(job, event)
    job = job.with_member(event.rank, frozen=event)
    if is_anyone_moving(job):
        return job, ()
    why_not = str(why_survivors_disagree(job))
    if event.boundary == 0:
        why_not = "ttprun has seen no step of a torch.optim optimizer yet, and saves at these alone"
    if job.incident is not None and job.incident.kind == StepDiffers.kind and event.boundary != job.stood_at:
        why_not = f"the others have taken step {job.stood_at} with it"
    if why_not:
        return give_up(job, event.at_s, why_not)
    job = replace(job, persists_at=event.boundary, stood_at=event.boundary)
    cause = "asked" if job.ending is None else "dying gasp" if job.ending.is_fault else "ended"
    cause = "resize" if is_resizing(job) else cause
    order = Persist(job.survivors, job.generation, event.boundary, cause)
    return enter(job, JobPhase.PERSISTING, event.at_s, (order, deadline_of(job, JobPhase.PERSISTING)))


def on_persisted(job: Job, event: StatePersisted) -> Result:
    """The checkpoint is written, or it could not be, by the agent's report."""
    if is_resizing(job):
        at_s, is_handled = event.at_s, event.is_handled
        return on_saved_to_resize(job, event, lambda job, why_not: go_on(job, at_s, why_not, is_handled))
    is_usable = bool(event.place) and not event.why_unusable
    if is_usable and job.persists_at is not None and not job.settings.saves_before_restart:
        job = replace(job, saved=(Saved(job.persists_at, event.place), *job.saved))
    notes: tuple[Action, ...] = ()
    if job.ending is not None and event.place:
        if not job.ending.is_replayable and is_usable:
            notes = (NoteUnusable(event.place, str(job.ending.why), is_refused=True),)
        note = f"{job.ending.reason}; {what_was_saved(job, event)}"
        job = replace(job, ending=replace(job.ending, reason=job.ending.reason.within(note)))
    job, actions = go_on(job, event.at_s, event.why_not, event.is_handled)
    return job, (*notes, *actions)


def what_was_saved(job: Job, event: StatePersisted) -> str:
    """How the checkpoint can be used, for the operator."""
    saved, older = "its state was saved", steps_reached(job) - (job.persists_at or 0)
    if not job.survivors and older > 0:
        saved = f"its state of step {job.persists_at} was saved (of the last {older} steps nothing was left)"
    if event.why_unusable:
        return f"the ranks' state was saved, but no run can resume from it ({event.why_unusable}): {event.place}"
    if job.ending is not None and not job.ending.is_replayable:
        return f"{saved}, but a replay of this script differs from the run, so none resumes: {event.place}"
    if job.ending is not None and job.ending.is_restart:
        return f"{saved}: {event.place}"
    if job.settings.saves_before_restart:  # whether the script loads it is up to the script
        return f"its framework has saved its state: {event.place}"
    if event.without:
        which = f"what no record holds as its set-up makes it ({event.without})"
        return f"{saved}, but a run that resumes from it has {which}: {event.place}"
    if job.settings.same_command_goes_on and job.ending is not None and is_of_script_itself(job):
        return f"{saved}, from which the same command resumes once the script is corrected: {event.place}"
    if job.settings.same_command_goes_on:
        return f"{saved}, the same command resumes from it: {event.place}"
    return f"{saved}; to resume from it: --resume {event.place}"


def is_of_script_itself(job: Job) -> bool:
    """Whether the job ends because its script fails again and again."""
    is_by_script = job.incident is not None and is_of_script(job.incident.kind)
    return is_by_script and job.ending is not None and not job.ending.has_progress


def on_mismatch_to_persist(job: Job, event: MismatchFound) -> Result:
    """A rank cannot write its part."""
    return give_up(job, event.at_s, f"rank {event.rank}: {event.reason}")


def give_up(job: Job, at_s: float, why_not: str) -> Result:
    """No checkpoint can be written: the job ends, or all resume.

    at_s      time of the event, monotonic
    why_not   completes "no checkpoint:"
    """
    job, notes = keep_nodes(job, why_not)
    job, actions = giving_up(job, why_not, go_on(job, at_s, why_not))
    return job, (*notes, *actions)


def giving_up(job: Job, why_not: str, answer: Result) -> Result:
    """Add to an answer the reason for the user who requested the checkpoint; a job that ends reports it at its end.

    job       before the answer
    why_not   completes "no checkpoint:"
    answer    returned as it is if the job is ending
    """
    if job.ending is not None:
        return answer
    after, actions = answer
    return after, (GiveUpCheckpoint(job.source.boundary if job.source is not None else 0, why_not), *actions)


def go_on(job: Job, at_s: float, why_not: str = "", is_handled: bool = False) -> Result:
    """Writing is over: the job ends, or all resume.

    why_not      why no checkpoint was written; "" if it was
    is_handled   the script handles the signal that ends it
    """
    if job.ending is not None and why_not:
        note = f"{job.ending.reason}; no checkpoint was written: {why_not}"
        job = replace(job, ending=replace(job.ending, reason=job.ending.reason.within(note)))
    stands_at = job.source.boundary if job.source is not None and not is_anyone_moving(job) else None
    if job.ending is not None and (job.ending.is_fault or job.lost or stands_at is None or not is_handled):
        return end_job(job, at_s)
    if stands_at is None:  # a rank cannot write, and others are not quiesced yet
        return begin_attempt(open_incident(job, at_s, "mismatch", why_not, detect_s=0.0), at_s)
    deadline = deadline_of(job, JobPhase.RESUMING)
    if job.ending is not None:  # its ranks only have to hear of the end: one that waits for another one never will
        deadline = structs.replace(deadline, after_s=job.settings.limits.halt_s)
    return enter(job, JobPhase.RESUMING, at_s, (Resume(job.survivors, job.generation, stands_at), deadline))


def on_exit_to_persist(job: Job, event: RankExited) -> Result:
    """A rank is lost: if the job ends, the others write without it, otherwise it is repaired first."""
    if event.is_finish:
        why_not = f"rank {event.rank} has finished"
        if job.ending is None:
            return giving_up(job, why_not, let_others_finish(job, event))
        return go_on(mark_finished(job, event), event.at_s, why_not)
    if job.ending is None:
        return giving_up(job, event.sentence, answer_fault(job, event))
    return persist_without(job, (event.rank,), event.at_s, "all ranks were lost")


def persist_without(job: Job, ranks: Collection[int], at_s: float, why_not: str) -> Result:
    """The job ends, and these ranks are lost before all have written: the others begin anew, if any can write.

    why_not   there is nothing to write
    """
    gone = (job.members[rank] for rank in ranks)
    job = job.with_members(*(replace(member, pid=None, life=RankState.LOST, is_protected=False) for member in gone))
    return begin_persisting(job, at_s) if holds_state(job) else go_on(job, at_s, why_not)


def on_node_lost_to_persist(job: Job, event: NodeLost) -> Result:
    """Ranks are lost with their node: if the job ends, the others write without them, otherwise they are replaced."""
    if job.ending is None:
        return giving_up(job, event.sentence, on_node_lost(job, event))
    gone = tuple(rank for rank in event.ranks if job.members[rank].life is not RankState.FINISHED)
    job = replace(without_nodes(job, gone), in_memory=())
    return persist_without(job, gone, event.at_s, "all ranks were lost")


def on_faulted_to_persist(job: Job, event: RankFaulted) -> Result:
    """The script has ended in one rank, and its process waits for orders."""
    if job.ending is None:
        return giving_up(job, event.sentence, on_faulted(job, event))
    job, actions = persist_without(job, (event.rank,), event.at_s, event.sentence)
    return job, (KillRank(event.rank, "the job ends"), *actions)


def on_deadline_to_persist(job: Job, event: DeadlinePassed) -> Result:
    """A rank is not quiesced in time: if the job ends, the others write without it.

    Otherwise it is an incident: connections are cut, and no rank can resume before all are quiesced.
    """
    if event.name == DEADLINE_NAMES[JobPhase.PERSISTING]:
        return give_up(job, event.at_s, f"it took more than {event.at_s - job.phase_since_s:.0f} s")
    late = tuple(rank for rank in job.survivors if job.members[rank].frozen is None)
    if event.name != HALT or job.persists_at is not None or not late:
        return unchanged(job, event)
    guilty = tuple(rank for rank in late if rank in event.silent) or late
    why_not = f"rank {', '.join(map(str, guilty))} did not quiesce within {job.settings.limits.halt_s:.0f} s"
    if job.ending is None:
        incident = open_incident(job, event.at_s, "hang", why_not, detect_s=0.0)
        return giving_up(job, why_not, begin_attempt(incident, event.at_s))
    if not {*job.survivors} - {*guilty}:
        return go_on(job, event.at_s, why_not)
    kills = tuple(KillRank(rank, why_not) for rank in guilty if job.members[rank].pid is not None)
    job, actions = persist_without(job, guilty, event.at_s, why_not)
    return job, (*kills, *actions)


def on_stop_while_persisting(job: Job, event: StopAsked) -> Result:
    """The job ends after the checkpoint that is being written."""
    if job.ending is not None and not (job.ending.is_restart or job.ending.goes_on or job.ending.is_resize):
        return unchanged(job, event)
    return replace(job, ending=Ending(reason=stopped_by(job, Reason(text=event.reason)), is_fault=False)), ()


def unless_ending(handler: Callable[[Job, Any], Result]) -> Callable[[Job, Any], Result]:
    """A handler of faults while all resume; if they do so only to end by themselves, the job ends instead."""

    def answer(job: Job, event: Event) -> Result:
        return handler(job, event) if job.ending is None else end_job(job, event.at_s)

    return answer
