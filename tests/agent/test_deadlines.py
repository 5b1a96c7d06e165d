"""When the deadlines of a recovery pass: the machine is real, the ranks and the time are played."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent.nodes import node_of, part
from ttprun import recovery
from ttprun.agent.lead.coordinator import Coordinator, Deadlines
from ttprun.protocol import patience
from ttprun.protocol.from_rank import RankProtected
from ttprun.protocol.process_orders import Action
from ttprun.protocol.rank_events import Event, RankExited, RankStarted
from ttprun.protocol.reason import Reason
from ttprun.recovery import FailJob, FinishJob, RestartGroup
from ttprun.recovery.job import Ending


class Played:
    """A job of three ranks of which rank 1 has died; stands for the node and the hang_detector.

    working   ranks that work
    passed    names of the deadlines that have passed
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(patience, "crowd", lambda: 1.0)
        self.working: set[int] = set()
        self.passed: list[str] = []
        self.job = recovery.new_job(recovery.Settings(world_size=3))
        for rank in range(3):
            self._decide(RankStarted(at_s=0.0, rank=rank, pid=10 + rank))
            self._decide(RankProtected(at_s=0.0, rank=rank))
        lost = RankExited(at_s=1.0, rank=1, pid=11, code=None, signal=signal.SIGKILL, boundary=5)
        (self.order,) = [one for one in self._decide(lost) if isinstance(one, recovery.SetDeadline)]
        self.deadlines = Deadlines(self, self)  # type: ignore[arg-type]

    def _decide(self, event: Event) -> tuple[Action, ...]:
        self.job, actions = recovery.advance(self.job, event)
        return actions

    def do_all_work(self, ranks: Any) -> bool:
        return bool(ranks) and set(ranks) <= self.working

    def silent_ranks(self) -> tuple[int, ...]:
        return ()

    def advance(self, event: Any) -> None:
        self.passed.append(event.name)

    def seconds_until_passed(self) -> float:
        began_s = self.now_s
        while not self.passed:
            self.now_s += 0.5
            self.deadlines.pass_time()
            assert self.now_s < 10_000
        return self.now_s - began_s


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


@pytest.mark.parametrize(
    ("working", "is_ending", "limit_s"),
    [((), False, 60.0), ((0, 2), False, 600.0), ((0,), False, 60.0), ((0, 2), True, 60.0)],
    ids=["nobody works", "all still work", "one does nothing", "the job is ended by a scheduler"],
)
def test_ranks_that_all_still_work_have_ten_times_the_time_that_was_set(
    played: Played, working: tuple[int, ...], is_ending: bool, limit_s: float
) -> None:
    played.working = set(working)
    if is_ending:
        played.job = replace(played.job, ending=Ending(reason="ended by SIGTERM", is_fault=False))
    played.deadlines.set(played.order)

    assert played.seconds_until_passed() == pytest.approx(limit_s, abs=limit_s / 60)
    assert played.passed == ["freeze"]


def test_a_deadline_of_an_older_generation_is_forgotten(played: Played) -> None:
    played.deadlines.set(played.order)
    played.job = SimpleNamespace(generation=played.order.generation + 1, phase=recovery.JobPhase.RUNNING)  # type: ignore[assignment]

    played.now_s += 1000.0
    played.deadlines.pass_time()

    assert played.passed == []


def test_a_wait_that_takes_long_is_told_once_with_whom_it_is_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(monkeypatch)
    played.deadlines.set(played.order)

    played.seconds_until_passed()

    (line,) = [record.message for record in caplog.records]
    assert line == (
        "still waiting for rank 0 to freeze, rank 1 to start, rank 2 to freeze (limit: 60 s without progress)"
    )


@pytest.mark.parametrize(
    ("orders", "verdict"),
    [
        ((RestartGroup(Reason(text="lost")), FailJob(Reason(text="NaN"), False)), ("fail", "NaN", False)),
        ((FailJob(Reason(text="NaN"), False), RestartGroup(Reason(text="lost"))), ("fail", "NaN", False)),
        ((FailJob(Reason(text="first"), True), FailJob(Reason(text="second"), False)), ("fail", "first", True)),
        ((FinishJob(), FailJob(Reason(text="too late"), True)), ("done", "", True)),
        ((RestartGroup(Reason(text="first")), RestartGroup(Reason(text="again"))), ("restart", "first", True)),
    ],
    ids=["a restart that has not begun", "an end", "two ends", "all have finished", "a restart ordered twice"],
)
def test_only_the_end_of_the_job_overrules_a_verdict_and_only_a_restart(
    tmp_path: Path, orders: tuple[Any, ...], verdict: tuple[str, str, bool]
) -> None:
    node = node_of(tmp_path)

    for order in orders:
        part(Coordinator, node).carry_out(order)

    assert node.verdict is not None
    assert (node.verdict.kind, node.verdict.reason, node.verdict.has_progress) == verdict
