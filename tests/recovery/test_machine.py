"""The table itself, the check of generations, and the errors that are ours. Whole incidents are in `scenarios`."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from ttprun.protocol.from_rank import (
    RankFaulted,
    RankFrozen,
    RankProtected,
    RankRebuilt,
    RankReissued,
    RankRepaired,
    RankReplayed,
    RankUnprotected,
    StateSent,
)
from ttprun.protocol.process_orders import SpawnRank
from ttprun.protocol.rank_events import Event, MismatchFound, RankExited, RankStarted
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Freeze
from ttprun.recovery import (
    RUNGS,
    TRANSITIONS,
    DeadlinePassed,
    ElasticDeclared,
    ForbiddenTransition,
    GroupRestarted,
    Job,
    JobPhase,
    MachineError,
    MissingTransition,
    PhaseLimits,
    RestartGroup,
    SetDeadline,
    Settings,
    UnexpectedStart,
    advance,
    groups_left,
    machine,
    new_job,
)
from ttprun.recovery.machine import Key, Transition
from ttprun.recovery.on_loss import on_exit
from ttprun.recovery.phases import unchanged


def running_job(settings: Settings) -> Job:
    """A job whose ranks have pids 100, 101 and so on, and have said hello."""
    job = new_job(settings)
    for rank in range(settings.world_size):
        job, _ = advance(job, RankStarted(rank=rank, pid=100 + rank, at_s=0.0))
        job, _ = advance(job, RankProtected(rank=rank, at_s=0.0))
    return job


def killed(rank: int, pid: int) -> RankExited:
    return RankExited(rank=rank, pid=pid, code=None, signal=9, boundary=5, at_s=10.0)


def job_that_freezes() -> Job:
    """Rank 2 of 3 has been killed; its replacement is not there yet."""
    job, _ = advance(running_job(Settings(world_size=3)), killed(2, pid=102))
    return job


def kinds_of(base: type[Event]) -> Iterator[type[Event]]:
    """The events that are there: what no other one is a kind of."""
    narrower = base.__subclasses__()
    for kind in narrower:
        yield from kinds_of(kind)
    if not narrower:
        yield base


def test_the_table_says_something_about_every_event_in_every_phase() -> None:
    assert set(TRANSITIONS) == {(phase, kind) for phase in JobPhase for kind in kinds_of(Event)}


def test_every_row_that_changes_nothing_says_why() -> None:
    silent = [key for key, row in TRANSITIONS.items() if row.handler is unchanged and not row.why]

    assert silent == []


def test_a_row_that_changes_nothing_stays_in_its_phase() -> None:
    moving = [key for key, row in TRANSITIONS.items() if row.handler is unchanged and row.leads_to != (key[0],)]

    assert moving == []


def test_nothing_leads_out_of_a_job_that_is_over() -> None:
    ways_out = {
        phase
        for key, row in TRANSITIONS.items()
        if key[0] in (JobPhase.DONE, JobPhase.FAILED)
        for phase in row.leads_to
    }

    assert ways_out == {JobPhase.DONE, JobPhase.FAILED}


def test_a_missing_row_is_our_bug_and_is_reported_with_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_that_freezes()
    monkeypatch.setattr(machine, "TRANSITIONS", {})

    with pytest.raises(MissingTransition, match="no row for RankFrozen in FREEZING") as caught:
        advance(job, RankFrozen(rank=0, generation=1, boundary=5, digest="", has_group=True, at_s=11.0))

    assert "RankExited(at_s=10.0, rank=2" in str(caught.value)


def test_a_phase_that_the_row_does_not_allow_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    job = running_job(Settings(world_size=3))
    table: dict[Key, Transition] = {(JobPhase.RUNNING, RankExited): Transition(on_exit, (JobPhase.RUNNING,))}
    monkeypatch.setattr(machine, "TRANSITIONS", table)

    with pytest.raises(ForbiddenTransition, match="RankExited led from RUNNING to FREEZING"):
        advance(job, killed(2, pid=102))


def test_a_rank_that_the_job_does_not_have_is_our_bug() -> None:
    job = running_job(Settings(world_size=2))

    with pytest.raises(MachineError, match="the job has no rank 2"):
        advance(job, killed(2, pid=102))


def test_a_second_process_of_a_living_rank_is_our_bug() -> None:
    job = running_job(Settings(world_size=2))

    with pytest.raises(UnexpectedStart, match="rank 1 was started, but it needs no process"):
        advance(job, RankStarted(rank=1, pid=999, at_s=1.0))


def test_a_start_that_is_said_twice_changes_nothing() -> None:
    job = running_job(Settings(world_size=2))

    after, actions = advance(job, RankStarted(rank=1, pid=101, at_s=1.0))

    assert after is job
    assert actions == ()


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_job_without_ranks_cannot_be_made(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}"):
        new_job(Settings(world_size=world_size))


@pytest.mark.parametrize(
    "echo",
    [
        killed(0, pid=999),
        killed(2, pid=102),
        RankFrozen(rank=0, generation=0, boundary=5, digest="", has_group=True, at_s=11.0),
        RankReplayed(rank=2, generation=0, boundary=5, at_s=11.0),
        StateSent(rank=0, generation=0, digest="", at_s=11.0),
        RankRepaired(rank=2, generation=0, digest="", at_s=11.0),
        RankRebuilt(rank=0, generation=0, at_s=11.0),
        RankReissued(rank=0, generation=0, at_s=11.0),
        MismatchFound(rank=0, generation=0, reason=Reason(text="other shape"), at_s=11.0),
        DeadlinePassed(generation=0, name="freeze", at_s=11.0),
        DeadlinePassed(generation=1, name="resume", at_s=11.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_echo_changes_nothing(echo: Event) -> None:
    job = job_that_freezes()

    after, actions = advance(job, echo)

    assert after is job
    assert actions == ()


def test_a_restarted_group_starts_from_nothing() -> None:
    job = running_job(Settings(world_size=2))
    job, _ = advance(job, RankUnprotected(rank=0, reason=Reason(text="no process group"), at_s=1.0))
    job, _ = advance(job, killed(1, pid=101))

    job, _ = advance(job, GroupRestarted(at_s=12.0))

    fresh = new_job(Settings(world_size=2))
    assert replace(job, story=(), faults=(), openings=()) == replace(
        fresh, generation=1, phase_since_s=12.0, incident_count=1, restarts=1
    )


def test_the_limits_of_the_settings_are_asked_for() -> None:
    settings = Settings(world_size=2, limits=PhaseLimits(freeze_s=7.0))

    _, actions = advance(running_job(settings), killed(1, pid=101))

    assert actions[:3] == (Freeze((0,), 1, (1,)), SpawnRank(1, 1), SetDeadline(1, "freeze", 7.0))


def test_many_ranks_may_be_lost_while_the_others_freeze() -> None:
    job = running_job(Settings(world_size=8, max_attempts=1))

    for rank in range(7):
        job, _ = advance(job, killed(rank, pid=100 + rank))

    assert job.phase is JobPhase.FREEZING
    assert job.lost == (0, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("name", [field.name for field in fields(Job)])
def test_a_job_cannot_be_changed_in_place(name: str) -> None:
    job = running_job(Settings(world_size=1))

    with pytest.raises(FrozenInstanceError):
        setattr(job, name, None)


@pytest.mark.parametrize(
    ("code", "signal", "is_script_error", "kind"),
    [
        (3, None, False, "exit 3"),
        (None, 9, False, "signal 9"),
        (1, None, True, "exception"),
        (None, None, False, "exit"),
    ],
)
def test_a_fault_is_named_by_how_the_process_ended(
    code: int | None, signal: int | None, is_script_error: bool, kind: str
) -> None:
    event = RankExited(rank=0, pid=100, code=code, signal=signal, boundary=5, is_script_error=is_script_error, at_s=1.0)

    assert event.kind == kind
    assert not event.is_finish


def test_a_fault_of_a_device_gives_its_name_to_the_incident_and_condemns_no_script() -> None:
    exited = RankExited(rank=1, pid=101, code=1, signal=None, boundary=0, device_fault="device-lost", at_s=1.0)
    faulted = RankFaulted(rank=1, pid=101, boundary=0, device_fault="memory-persistent", at_s=1.0)

    after_exit, _ = advance(running_job(Settings(world_size=2)), exited)
    after_fault, _ = advance(running_job(Settings(world_size=2)), faulted)

    assert after_exit.incident is not None
    assert (after_exit.incident.kind, after_exit.incident.rung) == ("device-lost", "replace")
    assert after_fault.incident is not None
    assert (after_fault.incident.kind, after_fault.incident.rung) == ("memory-persistent", "rerun")


def test_a_rank_that_cannot_train_with_fewer_ranks_is_named_in_the_reason() -> None:
    job = running_job(Settings(world_size=2, rungs=RUNGS - {"replace", "persist"}))
    job, _ = advance(job, ElasticDeclared(rank=0, at_s=1.0))

    job, actions = advance(job, killed(1, pid=101))

    assert job.phase is JobPhase.RESTARTING
    assert isinstance(actions[0], RestartGroup)
    assert "the others cannot continue without rank 1: rank 1 cannot train with fewer ranks" in actions[0].reason.text


def test_ranks_that_all_hold_the_same_train_on_without_the_one_that_is_lost() -> None:
    job = running_job(Settings(world_size=3, rungs=RUNGS - {"replace", "persist"}))
    for rank in range(3):
        job, _ = advance(job, ElasticDeclared(rank=rank, at_s=1.0))

    job, actions = advance(job, killed(1, pid=101))

    assert actions[0] == Freeze((0, 2), 1, ())
    assert (job.away, job.survivors, groups_left(job, 0)) == ((1,), (0, 2), ((0, 2),))
