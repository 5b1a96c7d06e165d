"""When standbys are started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent.processes import standby_watch as module
from ttprun.agent.processes.standby_watch import StandbyWatch


class FakeStandbys:
    """Knows how often it was filled."""

    def __init__(self) -> None:
        self.may_start = False
        self.refills = 0

    def refill(self, watch: Any, environment: Any) -> None:
        self.refills += 1

    def look(self, watch: Any) -> None: ...


class Ranks:
    """Two ranks that have torch, of which nothing is seen but that."""

    def __init__(self) -> None:
        slot = SimpleNamespace(rank=0, is_protected=True, handler=SimpleNamespace(start={"env": {}}))
        self.slots = self.here = [slot, slot]
        self.job: Any = SimpleNamespace(incident=None)
        self.standbys = FakeStandbys()
        self.watch = StandbyWatch(self, self.standbys)  # type: ignore[arg-type]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_standbys_are_started_after_the_first_step_and_not_in_an_incident_before_it(ranks: Ranks) -> None:
    ranks.watch.look()
    ranks.watch.refill()  # as after an incident
    before = ranks.standbys.refills

    ranks.watch.start()

    assert (before, ranks.standbys.refills) == (0, 1)


def test_standbys_that_come_due_in_an_incident_are_started_after_it(ranks: Ranks) -> None:
    ranks.job.incident = "one"
    ranks.watch.start()
    in_incident = ranks.standbys.refills

    ranks.watch.refill()

    assert (in_incident, ranks.standbys.refills) == (0, 1)


def test_a_job_whose_ranks_take_no_step_gets_its_standbys_after_a_while(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.watch.look()
    ranks.watch.look()
    at_first = ranks.standbys.refills
    monkeypatch.setattr(module, "STEPLESS_S", 0.0)

    for _ in range(3):
        ranks.watch.look()

    assert (at_first, ranks.standbys.refills) == (0, 1)


def test_the_while_begins_when_all_ranks_have_torch(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.slots.append(SimpleNamespace(is_protected=False))
    monkeypatch.setattr(module, "STEPLESS_S", 0.0)

    for _ in range(3):
        ranks.watch.look()

    assert ranks.standbys.refills == 0
