"""When standbys are started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent import watch
from ttprun.agent.reports import Reports
from ttprun.agent.watch import Watch
from ttprun.protocol import from_rank

MODULES = from_rank.ModulesOfTorch(["torch.fx"], [])


class FakeStandbys:
    """Knows whether it was filled, and with what warmth."""

    def __init__(self) -> None:
        self.may_start = False
        self.refills = 0
        self.warmth: list[list[str]] = []

    def refill(self, watch: Any, environment: Any) -> None:
        self.refills += 1

    def look(self, watch: Any) -> None: ...

    def warm_up(self, modules: list[str], files: list[str]) -> None:
        self.warmth.append(modules)


@pytest.fixture
def supervisor() -> Any:
    seat = SimpleNamespace(rank=0, is_protected=True, handler=SimpleNamespace(start={"env": {}}))
    found = SimpleNamespace(standbys=FakeStandbys(), seats=[seat, seat], job=SimpleNamespace(incident=None))
    found.watch = Watch(found)  # type: ignore[arg-type]
    return found


def test_standbys_are_started_after_the_first_step_and_not_in_an_incident_before_it(supervisor: Any) -> None:
    supervisor.watch.look()
    supervisor.watch.refill_standbys()  # as after an incident
    before = supervisor.standbys.refills

    Reports(supervisor).take(supervisor.seats[0], MODULES)

    assert (before, supervisor.standbys.refills) == (0, 1)
    assert supervisor.standbys.warmth == [["torch.fx"]]


def test_standbys_that_come_due_in_an_incident_are_started_after_it(supervisor: Any) -> None:
    supervisor.job.incident = "one"
    Reports(supervisor).take(supervisor.seats[0], MODULES)
    in_incident = supervisor.standbys.refills

    supervisor.watch.refill_standbys()

    assert (in_incident, supervisor.standbys.refills) == (0, 1)


def test_a_job_whose_ranks_take_no_step_gets_its_standbys_after_a_while(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.watch.look()
    supervisor.watch.look()
    at_first = supervisor.standbys.refills
    monkeypatch.setattr(watch, "STEPLESS_S", 0.0)

    for _ in range(3):
        supervisor.watch.look()

    assert (at_first, supervisor.standbys.refills) == (0, 1)


def test_the_while_begins_when_all_ranks_have_torch(supervisor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor.seats.append(SimpleNamespace(is_protected=False))
    monkeypatch.setattr(watch, "STEPLESS_S", 0.0)

    for _ in range(3):
        supervisor.watch.look()

    assert supervisor.standbys.refills == 0
