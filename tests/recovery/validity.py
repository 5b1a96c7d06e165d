"""What holds for a job after every transition, whatever has happened. Begin with `validate`."""

from __future__ import annotations

from ttprun import recovery
from ttprun.recovery import Action, Event, Job, JobPhase
from ttprun.recovery.machine import STORY_LENGTH
from ttprun.recovery.members import Members

QUIET = (JobPhase.RUNNING, JobPhase.DONE, JobPhase.FAILED)
MOST_RANKS = 16  # of a job that is checked: `test_scale.py` counts the work of larger ones
REQUESTED = (JobPhase.PERSISTING, JobPhase.REPLAYING, JobPhase.RESUMING)  # also without a fault: by an operator


def advance(job: Job, event: Event) -> tuple[Job, tuple[Action, ...]]:
    """As `recovery.advance`, and both what it returns and the way there are checked."""
    after, actions = recovery.advance(job, event)
    if len(after.members) <= MOST_RANKS:
        validate(after)
    assert after.generation >= job.generation
    assert after.incident_count >= job.incident_count
    assert after is not job or actions == ()
    return after, actions


def validate(job: Job) -> None:
    """Fail if a job contradicts itself. A job inside it, of a rank that trains alone, is checked as well."""
    assert [member.rank for member in job.members] == list(range(len(job.members)))
    assert job.members.counts == Members.of(job.members).counts
    assert len(job.story) <= STORY_LENGTH
    assert job.incident is None or job.incident.id <= job.incident_count
    assert job.incident is None or job.phase not in QUIET
    assert job.incident is not None or job.phase in (*QUIET, *REQUESTED)
    assert job.rewind_to is not None or not job.rewind_place
    if job.phase is JobPhase.RUNNING and not job.alone:  # else some ranks may be in a repair of their own
        assert job.lost == job.quiesced == ()
        assert job.rewind_to is None
        assert not any(member.has_answers for member in job.members)
    for rank, own in job.alone.items():
        assert 0 <= rank < len(job.members)
        assert own.settings.is_alone
        validate(own)
