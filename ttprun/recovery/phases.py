"""How phases begin, how incidents are opened, counted and closed, the orders of the machine, and its own errors.

A function that answers an event returns a `Result`: the job as it is then, and the orders. A `MachineError` carries the
story, so that a report is enough to repeat it; the agent that catches one fails open: it continues as under torchrun.

The orders here are for the agent that leads, and data only; each is carried out in the order in which it is given.
Those that the agent of one node carries out are in `ttprun.protocol.process_orders`, those for ranks in
`ttprun.protocol.to_rank`. A message to a rank that has not said hello yet is held by the agent, and a newer one takes
its place. A message for a process that has ended is dropped.

At the end are the ways back: all ranks, or one that is alone, resume from a snapshot, a checkpoint or the script's top.
Begin with `enter` and `go_back`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttprun.protocol.process_orders import Action, KillRank, Rewind, SpawnRank
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import NOBODY, WINDOW_S, FaultIdentity, FaultsTold, Incident, Job, JobPhase, Opening
from ttprun.recovery.job_events import Saved
from ttprun.recovery.state_origins import steps_reached, who_goes_back

Result = tuple[Job, tuple[Action, ...]]

DEADLINE_NAMES = {
    JobPhase.FREEZING: "freeze",
    JobPhase.REPLAYING: "replay",
    JobPhase.TRANSFERRING: "transfer",
    JobPhase.RESUMING: "resume",
    JobPhase.PERSISTING: "persist",
    JobPhase.DRAINING: "drain",
}
CONNECTION = "connection"  # kind of an incident of links, see `ConnectionBroken.kind`
RESUME = "resume"  # kind of a new launch that resumes from a checkpoint, which is not an incident
HALT = "halt"  # the deadline to quiesce, with which PERSISTING begins
# What each attempt measures.
UNDONE = dict.fromkeys(("boundary", "freeze_s", "replay_s", "transfer_s", "rebuild_s", "reissue_s"))


class NoteUnusable(Action, frozen=True):
    """Note beside a checkpoint that this script could not resume from it, so that no launch tries it again.

    place        its directory
    reason       why not
    is_refused   False: processes were lost on the way, which may go better the next time
    """

    place: str
    reason: str
    is_refused: bool


class Persist(Action, frozen=True):
    """Write a checkpoint of the boundary at which all survivors are quiesced; the answer is StatePersisted.

    ranks     survivors; each writes a part of what they all hold. (): what shared memory keeps of it is written
    cause     for the checkpoint's manifest
    is_own    without ranks: what the rank that is alone keeps of itself is written, and no snapshot
    """

    ranks: tuple[int, ...]
    generation: int
    boundary: int
    cause: str
    is_own: bool = False


class GiveUpCheckpoint(Action, frozen=True):
    """The requested checkpoint is not written, and the job continues: drop it, and report why.

    boundary   at which the ranks stand, 0 if that is not known
    reason     for who has asked
    """

    boundary: int
    reason: str


class SetDeadline(Action, frozen=True):
    """Post DeadlinePassed with this generation, name and rank after so many seconds; it need never be cancelled.

    rank   that is repaired alone, and whose own the generation is; None: it is the job's
    """

    generation: int
    name: str
    after_s: float
    rank: int | None = None


class LetNodeGo(Action, frozen=True):
    """All stand still, and a node leaves as planned: its launcher ends, and its ranks are started on another one.

    ranks    all of its ranks that have not finished
    reason   for the operator
    """

    ranks: tuple[int, ...]
    reason: str


class RestartGroup(Action, frozen=True):
    """Fallback: end all ranks and start them anew, as torchrun does; the answer is GroupRestarted.

    Given again before that, it changes nothing.

    reason   for the operator
    """

    reason: Reason


class Regroup(Action, frozen=True):
    """End all ranks and start the group again on the nodes that are there then; the answer is GroupResized.

    place      of the checkpoint from which all resume; "": they run the script from its top
    boundary   of that
    reason     for the operator
    is_back    without the nodes that came last, which cannot take part
    """

    place: str
    boundary: int
    reason: Reason
    is_back: bool = False


class GiveUpResize(Action, frozen=True):
    """The group stays on its nodes for now.

    reason   why its state could not be saved, or not resumed from
    """

    reason: str


class FailJob(Action, frozen=True):
    """End all ranks; the job has failed.

    reason         for the operator
    has_progress   False if the same fault comes back again and again (exit code 93)
    """

    reason: Reason
    has_progress: bool = True


class FinishJob(Action, frozen=True):
    """All ranks have finished; the job is done."""


class RecordIncident(Action, frozen=True):
    """Write the incident to the event log: it was opened, changed its phase, or ended."""

    incident: Incident


def open_incident(job: Job, at_s: float, kind: str, fault: str, detect_s: float) -> Job:
    """The job with a new incident, in which no rank is lost yet.

    fault   a sentence
    """
    job = replace(job, incident=_new_incident(job, at_s, kind, fault, detect_s), cause=fault, is_contradicted=False)
    return count_as_incident(job, at_s, kind)


def open_resume(job: Job, at_s: float, why: str) -> Job:
    """A new launch that resumes from a checkpoint: not an incident, unless a rank is lost meanwhile.

    at_s   time of the event, monotonic
    why    the incident's reason and cause: from where the run resumes
    """
    incident = _new_incident(job, at_s, RESUME, why, detect_s=0.0)
    return replace(job, incident=incident, cause=why, is_contradicted=False)


def add_fault(job: Job, fault: str) -> Job:
    """The job with another fault in the open incident: in words the first one, and the newest with its number."""
    assert job.incident is not None
    told = told_of(job.told, job.cause).and_then(fault)
    reason = job.incident.reason
    since = told_of(job.since, reason.text).and_then(fault)
    return replace(job, cause=str(told), told=told, since=since).with_incident(reason=reason.within(str(since)))


def told_of(faults: FaultsTold, text: str) -> FaultsTold:
    """What a phrase says, if it is this; else the phrase as that of one fault."""
    return faults if str(faults) == text else FaultsTold(text)


def count_as_incident(job: Job, at_s: float, kind: str) -> Job:
    """Number the open incident, and count it against the limits.

    at_s   time of the event, monotonic; openings more than WINDOW_S before it are forgotten
    kind   of the fault, on which the limit for incidents of one kind depends
    """
    recent = (opening for opening in job.openings if opening.at_s > at_s - WINDOW_S)
    openings = (*recent, Opening(at_s=at_s, kind=kind))
    number = job.incident_count + 1
    return replace(job.with_incident(id=number, kind=kind), incident_count=number, openings=openings)


def _new_incident(job: Job, at_s: float, kind: str, fault: str, detect_s: float) -> Incident:
    return Incident(
        id=0,
        kind=kind,
        ranks=(),
        rung="replace",
        outcome="open",
        reason=Reason(text=fault),
        phase=job.phase,
        generation=job.generation,
        opened_at_s=at_s,
        detect_s=detect_s,
    )


def enter(job: Job, phase: JobPhase, at_s: float, actions: tuple[Action, ...] = (), **incident_changes: Any) -> Result:
    """Begin a phase; the open incident is recorded, and closed if its outcome is no longer open.

    at_s               time of the event, monotonic
    actions            of the answer, before the order to record the incident
    incident_changes   fields of the open incident; left out if none is open
    """
    job = replace(job, phase=phase, phase_since_s=at_s)
    if job.incident is None:
        return job, actions
    incident = replace(job.incident, phase=phase, generation=job.generation, **incident_changes)
    if incident.outcome == "open":
        return replace(job, incident=incident), (*actions, RecordIncident(incident))
    incident = replace(incident, total_s=(incident.detect_s or 0.0) + at_s - incident.opened_at_s)
    return replace(job, incident=None, cause="", is_growing=False), (*actions, RecordIncident(incident))


def deadline_of(job: Job, phase: JobPhase, extra_s: float = 0.0) -> SetDeadline:
    """The deadline with which a phase begins.

    phase     one that has a deadline (DEADLINE_NAMES)
    extra_s   added to the limit in the settings
    """
    name = DEADLINE_NAMES[phase]
    limit_s: float = getattr(job.settings.limits, f"{name}_s")
    return SetDeadline(job.generation, name, limit_s + extra_s)


def reason_of(job: Job, why: Reason) -> Reason:
    """The cause first, and then why it was not answered by the rung above; not what was tried in between.

    why   none if there is nothing to add
    """
    if job.incident is None:
        return why
    if not why:
        return job.incident.reason
    if job.incident.kind == RESUME or not job.cause:
        return why.within(f"{why}; {job.incident.reason}")
    answer = "not reconnected" if job.incident.kind == CONNECTION else "not replaced"
    return why.within(f"{job.cause}; {answer}: {why}")


def unchanged(job: Job, event: Event) -> Result:
    """The event needs no answer; its row says why."""
    return job, ()


class MachineError(Exception):
    """The machine or the agent has a bug.

    what    is wrong, a sentence
    job     before the event
    event   that could not be handled
    """

    def __init__(self, what: str, job: Job, event: Event) -> None:
        self.job = job
        self.event = event
        story = "\n".join(f"  {past!r}" for past in job.story)
        super().__init__(f"{what}\nevent: {event!r}\nincident: {job.incident!r}\nnewest events before it:\n{story}")


class MissingTransition(MachineError):
    """No row of the table says what to do."""


class ForbiddenTransition(MachineError):
    """A handler has led to a phase that its row does not allow."""


class UnexpectedStart(MachineError):
    """A process was started for a rank that has one, or has finished: the rank's real process would go unwatched."""


def go_back(job: Job, at_s: float, to: Saved, why: Reason) -> Result:
    """All ranks resume from a stored state; with boundary 0 they start from the top.

    why   for the operator
    """
    job = replace(job.with_incident(reason=why), back_to=to, ending=None)
    if to.place or not to.boundary:  # the reason held for the old processes
        job = replace(job, unprotected_reason=Reason())
    if to.place and not job.is_resumed:
        job = replace(job, went_back_to=to.boundary)
    return begin_rewind(job, at_s)


def why_no_rewind(job: Job, to: Saved) -> Reason:
    """Why another rewind to a snapshot would not help; "" if it may."""
    cause = what_sends_back(job, to)
    times = job.rewinds.count(cause)
    if times < job.settings.max_rewinds:
        return Reason()
    return Reason(
        "same-fault-again",
        f"all ranks went back to step {to.boundary} {times} times, and the same fault comes back ({cause.kind})",
    )


def what_sends_back(job: Job, to: Saved) -> FaultIdentity:
    """The kind of the open incident, with the boundary of its newest fault, or else of the snapshot."""
    kind = "" if job.incident is None else job.incident.kind
    places = [past.boundary for past in job.faults if past.kind == kind]
    return FaultIdentity(rank=NOBODY, kind=kind, boundary=places[-1] if places else to.boundary)


def begin_rewind(job: Job, at_s: float) -> Result:
    """Rung "rewind": every rank gets a new process, which replays up to the stored boundary.

    Rung "restart" if that is a checkpoint that this job has saved because nothing else was possible; "replace" if a
    rank that is alone returns to its newest step.
    """
    assert job.back_to is not None
    boundary, place, is_own = job.back_to.boundary, job.back_to.place, job.back_to.is_own
    job = replace(job, generation=job.generation + 1)
    is_alone = job.settings.is_alone
    where = f"all ranks go back to step {boundary}" if boundary else "all ranks start anew"
    if is_alone:
        where = f"it goes back to step {boundary}" if boundary else "it starts anew"
    present = [job.members[rank] for rank in who_goes_back(job)]
    kills = tuple(KillRank(member.rank, where) for member in present if member.pid is not None)
    unasked = [member.rank for member in present if member.pid is not None or member.spawn_asked_at_s is None]
    job = job.with_members(*(member.as_lost(at_s) for member in present))
    job = replace(job, persists_at=None)
    spawns = (SpawnRank(rank, job.generation) for rank in unasked)
    ranks = tuple(member.rank for member in present)
    actions = (*kills, Rewind(ranks, boundary, place, is_own), *spawns, deadline_of(job, JobPhase.REPLAYING))
    rung = "restart" if place and not job.is_resumed else "rewind"
    if rung == "restart" and job.incident is not None and job.incident.rung == "resize":
        rung = "resize"
    if is_alone and not place and boundary >= steps_reached(job):
        rung = "replace"
    return enter(job, JobPhase.REPLAYING, at_s, actions, rung=rung, **UNDONE | {"boundary": boundary})
