"""How phases begin, how incidents are opened, counted and closed, and the machine's own errors.

A function that answers an event returns a `Result`: the job as it is then, and the orders. A `MachineError` carries the
story, so that a report is enough to repeat it; the agent that catches one fails open: it continues as under torchrun.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttprun.protocol.process_orders import Action
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reason import Reason
from ttprun.recovery.job import WINDOW_S, FaultsTold, Incident, Job, JobPhase, Opening
from ttprun.recovery.job_orders import RecordIncident, SetDeadline

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
