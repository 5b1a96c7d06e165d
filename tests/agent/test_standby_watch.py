"""When standbys are started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent.node import standbys as module
from ttprun.agent.node.standbys import StandbyWatch

READY = "standby ready (torch loaded): a lost rank is now replaced in about a second"


class FakeStandbys:
    """Knows how often it was filled."""

    is_wanted = True
    state = "ready, torch loaded"

    def __init__(self) -> None:
        self.may_start = self.is_complete = False
        self.ready = 0
        self.refills = 0

    def refill(self, watch: Any, environment: Any) -> None:
        self.refills += 1

    def look(self, watch: Any) -> None: ...

    def look_for_contexts(self, watch: Any) -> None: ...


class Ranks:
    """Two ranks that have torch, of which nothing is seen but that."""

    def __init__(self) -> None:
        slot = SimpleNamespace(rank=0, is_protected=True, import_s=4.0, handler=SimpleNamespace(start={"env": {}}))
        self.slots = self.here = [slot, slot]
        self.peers = SimpleNamespace(node=0)
        self.is_in_incident = self.is_unprotected = False
        self.standbys = FakeStandbys()
        self.watch = StandbyWatch(self, self.standbys)  # type: ignore[arg-type]

    def look(self) -> None:
        for _ in range(3):
            self.watch.look()


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
    ranks.is_in_incident = True
    ranks.watch.start()
    in_incident = ranks.standbys.refills

    ranks.watch.refill()

    assert (in_incident, ranks.standbys.refills) == (0, 1)


def test_a_job_whose_ranks_take_no_step_gets_its_standbys_after_a_while(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.look()
    at_first = ranks.standbys.refills
    monkeypatch.setattr(module, "STEPLESS_S", 0.0)

    ranks.look()

    assert (at_first, ranks.standbys.refills) == (0, 1)


def test_the_while_begins_when_all_ranks_have_torch(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.slots.append(SimpleNamespace(is_protected=False))
    monkeypatch.setattr(module, "STEPLESS_S", 0.0)

    ranks.look()

    assert ranks.standbys.refills == 0


def test_the_user_is_told_once_that_a_standby_is_ready(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.watch.look()
    ranks.watch.start()
    ranks.watch.look()
    before = list(caplog.messages)
    ranks.standbys.is_complete = True

    ranks.look()

    assert (before, caplog.messages) == ([], [READY])


def test_nobody_is_told_of_a_standby_that_no_rank_may_use(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.is_unprotected = ranks.standbys.is_complete = True
    ranks.watch.start()

    ranks.look()

    assert caplog.messages == []


def test_while_none_is_ready_for_long_the_user_is_told_what_a_lost_rank_costs(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.0)
    ranks.watch.start()

    ranks.look()
    ranks.standbys.is_complete = True
    ranks.watch.look()

    late, ready = caplog.messages
    assert late.startswith("no standby is ready yet: ")
    assert "imports torch first (4 s at the start of this job)" in late
    assert ready == READY


def test_one_that_has_not_imported_all_for_long_is_ready_all_the_same(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.0)
    ranks.standbys.ready = 1
    ranks.watch.start()

    ranks.look()

    assert caplog.messages == [READY]


@pytest.mark.parametrize("what", ["another node", "none wanted"])
def test_other_nodes_and_jobs_without_standbys_say_nothing_of_them(
    ranks: Ranks, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.peers.node = int(what == "another node")
    ranks.standbys.is_wanted = what != "none wanted"  # type: ignore[misc]
    ranks.standbys.is_complete = True
    ranks.watch.start()

    ranks.watch.look()

    assert caplog.messages == []
