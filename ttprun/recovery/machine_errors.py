"""What we got wrong: errors of the machine itself. They carry the story, so that a report is enough to repeat them.

The agent that catches one must fail open: continue as under torchrun.
"""

from __future__ import annotations

from ttprun.protocol.rank_events import Event
from ttprun.recovery.job import Job


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
