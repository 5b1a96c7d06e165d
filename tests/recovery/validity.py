"""What holds for a job after every transition, whatever has happened. Begin with `validate`."""

from __future__ import annotations

from ttprun import recovery
from ttprun.protocol.process_orders import Action
from ttprun.protocol.rank_events import Event
from ttprun.recovery import Job, JobPhase
from ttprun.recovery.machine import STORY_LENGTH
from ttprun.recovery.members import Members
from ttprun.recovery.phases import DEADLINE_NAMES, HALT

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
    assert_waits_have_deadlines(job, after, actions)
    return after, actions


def assert_waits_have_deadlines(job: Job, after: Job, actions: tuple[Action, ...]) -> None:
    """Whoever begins to wait for something, in whatever phase, has a deadline for it from that moment."""
    names = {*DEADLINE_NAMES.values()}
    assert {JobPhase.RUNNING, JobPhase.RESTARTING, JobPhase.DONE, JobPhase.FAILED} == {*JobPhase} - {*DEADLINE_NAMES}
    ordered = {(one.rank, one.generation, one.name) for one in actions if isinstance(one, recovery.SetDeadline)}
    both = [(None, job, after), *((rank, job.alone.get(rank), own) for rank, own in after.alone.items())]
    for rank, old, new in both:
        began = old is None or (old.phase, old.generation) != (new.phase, new.generation)
        if new.phase in DEADLINE_NAMES and began:
            name = DEADLINE_NAMES[new.phase]
            wanted = {(rank, new.generation, name)} | ({(rank, new.generation, HALT)} if name == "persist" else set())
            assert ordered & wanted, f"{new.phase} of rank {rank} waits without a deadline"
    assert {name for _, _, name in ordered} <= names | {HALT}


def validate(job: Job) -> None:
    """Fail if a job contradicts itself. A job inside it, of a rank that trains alone, is checked as well."""
    assert [member.rank for member in job.members] == list(range(len(job.members)))
    assert job.members == Members.of(job.members)
    assert len(job.story) <= STORY_LENGTH
    assert job.incident is None or job.incident.id <= job.incident_count
    assert job.incident is None or job.phase not in QUIET
    assert job.incident is not None or job.phase in (*QUIET, *REQUESTED)
    if job.phase is JobPhase.RUNNING and not job.alone:  # else some ranks may be in a repair of their own
        assert job.lost == job.quiesced == ()
        assert job.back_to is None
        assert not any(member.has_answers for member in job.members)
    for rank, own in job.alone.items():
        assert 0 <= rank < len(job.members)
        assert own.settings.is_alone
        validate(own)
