"""A scheduler is told what happens in MindIO's words, and what it asks for becomes an event of the state machine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.schedulers import Scheduler
from ttprun.board import Board, Field
from ttprun.recovery import Incident, Phase

OPENED = Incident(
    id=1,
    kind="signal 9",
    ranks=(1,),
    rung="replace",
    outcome="open",
    reason="rank 1 was ended by signal 9",
    phase=Phase.FREEZING,
    generation=1,
    opened_at_s=0.0,
)


class FakeSeat:
    """A place of a rank that notes what the rank is told."""

    def __init__(self, rank: int) -> None:
        self.rank = self.local_rank = rank
        self.pid = 100 + rank
        self.is_present = True
        self.told: list[dict[str, Any]] = []

    def tell(self, message: dict[str, Any]) -> None:
        self.told.append(message)


class FakeSupervisor:
    """Two ranks that train at step 4, and nobody else."""

    def __init__(self) -> None:
        self.seats = [FakeSeat(0), FakeSeat(1)]
        self.job: Any = SimpleNamespace(survivors=(0, 1), generation=0, phase=Phase.RUNNING)
        self.board = Board.create(2)[1]
        for rank in range(2):
            self.board.set(rank, Field.APPLIED, 4)
        self.events: list[recovery.Event] = []

    def advance(self, event: recovery.Event) -> None:
        self.events.append(event)

    def log(self, event: str, **fields: object) -> None: ...


@pytest.fixture
def supervisor() -> FakeSupervisor:
    """Its ranks have no scheduler yet."""
    return FakeSupervisor()


@pytest.fixture
def scheduler(supervisor: FakeSupervisor) -> Scheduler:
    """It lives in rank 0."""
    found = Scheduler(supervisor)  # type: ignore[arg-type]
    found.register(supervisor.seats[0])  # type: ignore[arg-type]
    return found


def test_a_replaced_rank_is_reported_from_the_fault_to_the_result(
    supervisor: FakeSupervisor, scheduler: Scheduler
) -> None:
    for phase, outcome in (
        (Phase.FREEZING, "open"),
        (Phase.REPLAYING, "open"),
        (Phase.RESUMING, "open"),
        (Phase.RUNNING, "recovered"),
    ):
        scheduler.note_incident(replace(OPENED, phase=phase, outcome=outcome))

    assert [(told["action"], told["arguments"]) for told in supervisor.seats[0].told] == [
        ("report_fault_ranks", [{1: 1}, {1: ""}]),
        ("report_stop_complete", [0, "stopped", {1: 1}]),
        ("report_strategies", [{1: 1}, ["recover", "dump", "exit"]]),
        ("report_result", [0, "rank 1 was ended by signal 9", {1: 1}, "recover"]),
    ]


def test_failed_memory_is_a_fault_of_kind_zero_that_is_retried(
    supervisor: FakeSupervisor, scheduler: Scheduler
) -> None:
    memory = replace(OPENED, kind="memory-persistent", rung="rerun")
    scheduler.note_incident(memory)
    scheduler.note_incident(replace(memory, phase=Phase.FAILED, outcome="failed"))

    assert supervisor.seats[0].told[0]["arguments"][0] == {1: 0}
    assert supervisor.seats[0].told[-1]["arguments"][0] == 405
    assert supervisor.seats[0].told[-1]["arguments"][3] == "retry"


def test_without_a_scheduler_nobody_is_told(supervisor: FakeSupervisor) -> None:
    Scheduler(supervisor).note_incident(OPENED)  # type: ignore[arg-type]

    assert supervisor.seats[0].told == []


def test_a_rank_that_the_scheduler_calls_faulty_is_replaced(supervisor: FakeSupervisor, scheduler: Scheduler) -> None:
    scheduler.notified({"what": "stop", "ranks": {"1": 1}})

    (event,) = supervisor.events
    assert isinstance(event, recovery.RankHung)
    assert (event.rank, event.pid) == (1, 101)


def test_a_rank_whose_memory_the_scheduler_calls_faulty_repairs_it_in_its_process(
    supervisor: FakeSupervisor, scheduler: Scheduler
) -> None:
    scheduler.notified({"what": "stop", "ranks": {"1": 0}})

    assert supervisor.events == []
    assert supervisor.seats[1].told == [{"op": "uce", "generation": 0}]


def test_a_fault_that_is_known_already_is_no_news(supervisor: FakeSupervisor, scheduler: Scheduler) -> None:
    supervisor.job.survivors = (0,)

    scheduler.notified({"what": "stop", "ranks": {"1": 1}})

    assert supervisor.events == []


@pytest.mark.parametrize("what", ["dump", "exit"])
def test_the_scheduler_can_end_the_job(supervisor: FakeSupervisor, scheduler: Scheduler, what: str) -> None:
    scheduler.notified({"what": what})

    assert [type(event) for event in supervisor.events] == [recovery.StopAsked]


def test_a_pause_is_for_all_at_one_step_and_ends_when_it_is_told(
    supervisor: FakeSupervisor, scheduler: Scheduler
) -> None:
    scheduler.notified({"what": "pause", "timeout_s": None})
    was_paused = scheduler.is_paused
    scheduler.notified({"what": "continue"})

    assert was_paused
    assert not scheduler.is_paused
    for seat in supervisor.seats:
        assert [(told["op"], told["step"]) for told in seat.told] == [("pause", 5), ("pause", None)]


def test_a_pause_ends_by_itself_when_its_time_is_over(supervisor: FakeSupervisor, scheduler: Scheduler) -> None:
    scheduler.notified({"what": "pause", "timeout_s": 0.0})
    scheduler.look()

    assert not scheduler.is_paused
