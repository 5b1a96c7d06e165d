"""Handlers for saved state: snapshots, checkpoints, and resuming from one.

PERSISTING: all living ranks quiesce at one boundary, as for a repair; then each writes a part of the state, and the
agent makes a checkpoint of the parts. If the job continues, they reconnect and issue their journals, as after a broken
link, so a checkpoint is possible at any moment. If the user ends the job and the script handles the signal, they resume
too, so that the script can act on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from ttprun.protocol.from_rank import RankFaulted, RankFrozen
from ttprun.protocol.process_orders import Action, KillRank
from ttprun.protocol.rank_events import Event, MismatchFound, RankExited, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Resume
from ttprun.recovery.job import Ending, Job, JobPhase
from ttprun.recovery.job_events import (
    CheckpointAsked,
    DeadlinePassed,
    NodeLost,
    ResumeAsked,
    Saved,
    SnapshotTaken,
    StatePersisted,
)
from ttprun.recovery.job_orders import GiveUpCheckpoint, NoteUnusable, Persist
from ttprun.recovery.ladder import begin_attempt, begin_persisting, end_job, holds_state, stopped_by, why_not_saved
from ttprun.recovery.members import RankState
from ttprun.recovery.on_leave import let_others_finish, mark_finished
from ttprun.recovery.on_loss import answer_fault, is_of_script, on_faulted, on_node_lost, without_nodes
from ttprun.recovery.on_request import is_resizing, keep_nodes, on_saved_to_resize
from ttprun.recovery.phases import (
    DEADLINE_NAMES,
    HALT,
    Result,
    deadline_of,
    enter,
    open_incident,
    open_resume,
    unchanged,
)
from ttprun.recovery.repair import is_anyone_moving, why_survivors_disagree
from ttprun.recovery.ways_back import go_back, steps_reached


def on_snapshot(job: Job, event: SnapshotTaken) -> Result:
    """There is a newer snapshot to rewind to, unless no replay could reach it."""
    if job.hindrance and not job.settings.is_alone:  # a rank that is alone keeps only what a replay can reach
        return job, ()
    rewinds = job.rewinds if event.boundary == job.snapshot else ()
    return replace(job, snapshot=event.boundary, rewinds=rewinds), ()


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
        why_not = "no optimizer step has been completed yet"
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
    job = job.with_member(event.rank, pid=None, life=RankState.LOST, is_protected=False)
    return begin_persisting(job, event.at_s) if holds_state(job) else go_on(job, event.at_s, "all ranks were lost")


def on_node_lost_to_persist(job: Job, event: NodeLost) -> Result:
    """Ranks are lost with their node: if the job ends, the others write without them, otherwise they are replaced."""
    if job.ending is None:
        return giving_up(job, event.sentence, on_node_lost(job, event))
    gone = (job.members[rank] for rank in event.ranks if job.members[rank].life is not RankState.FINISHED)
    job = job.with_members(*(replace(member, pid=None, life=RankState.LOST, is_protected=False) for member in gone))
    job = without_nodes(job, tuple(rank for rank in event.ranks if job.members[rank].life is RankState.LOST))
    return begin_persisting(job, event.at_s) if job.survivors else go_on(job, event.at_s, "all ranks were lost")


def on_faulted_to_persist(job: Job, event: RankFaulted) -> Result:
    """The script has ended in one rank, and its process waits for orders."""
    if job.ending is None:
        return giving_up(job, event.sentence, on_faulted(job, event))
    job = job.with_member(event.rank, pid=None, life=RankState.LOST, is_protected=False)
    kill = KillRank(event.rank, "the job ends")
    job, actions = begin_persisting(job, event.at_s) if holds_state(job) else go_on(job, event.at_s, event.sentence)
    return job, (kill, *actions)


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
    for rank in guilty:
        job = job.with_member(rank, pid=None, life=RankState.LOST, is_protected=False)
    job, actions = begin_persisting(job, event.at_s)
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
