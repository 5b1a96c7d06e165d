"""When the order to quiesce is given: decisions, with the ranks played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.lead import schedules as module
from ttprun.agent.lead.schedules import LIMIT_S, QuiesceSchedule
from ttprun.protocol.board import Board, Field


class FakeNode:
    """What the decisions look at: a job that runs and can be saved, and a board."""

    def __init__(self) -> None:
        self.job: Any = SimpleNamespace(phase=recovery.JobPhase.RUNNING)
        self.slots: list[Any] = [SimpleNamespace(local_rank=rank) for rank in range(2)]
        self.board = Board.create(2)[1]


class Job:
    """Ranks that stand at a boundary, of which the newest open one is known.

    now_s   the clock
    given   orders that were given
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.why_not_saved = ""
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(recovery, "why_not_saved", lambda job: self.why_not_saved)
        self.node = FakeNode()
        self.quiesce_schedule = QuiesceSchedule(self.node)  # type: ignore[arg-type]
        self.given: list[str] = []

    def ask(self, what: str, is_end: bool = True) -> None:
        def give() -> None:
            self.given.append(what)
            self.node.job.phase = recovery.JobPhase.PERSISTING

        self.quiesce_schedule.ask(give, is_end)

    def stand(self, applied: int, open_at: int) -> None:
        self.node.board.set(0, Field.APPLIED, applied)
        self.node.board.set(0, Field.OPEN_AT, open_at)
        self.quiesce_schedule.look()

    @property
    def has_leader_heard(self) -> bool:
        return self.node.board.get(0, Field.QUIESCE_ASKED) != 0


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


@pytest.mark.parametrize(("applied", "open_at"), [(41, 41), (40, 41)], ids=["at it", "on the way to it"])
def test_at_an_open_boundary_the_ranks_train_on_to_the_next(job: Job, applied: int, open_at: int) -> None:
    job.stand(applied, open_at)

    job.ask("end")
    before, is_reported = list(job.given), job.has_leader_heard
    job.stand(applied=42, open_at=41)

    assert (before, is_reported) == ([], True)
    assert job.given == ["end"]


def test_the_first_rank_is_held_back_until_the_job_runs_again(job: Job) -> None:
    """Before it has heard that it is to quiesce, it must not be released."""
    job.ask("checkpoint", is_end=False)

    job.quiesce_schedule.look()
    while_saving = job.has_leader_heard
    job.node.job.phase = recovery.JobPhase.RUNNING
    job.quiesce_schedule.look()

    assert (while_saving, job.has_leader_heard) == (True, False)


def test_ranks_that_come_to_no_other_boundary_are_stopped_where_they_are(job: Job) -> None:
    job.stand(applied=41, open_at=41)
    job.ask("end")

    job.now_s += LIMIT_S / 2
    job.stand(applied=42, open_at=42)
    early = list(job.given)
    job.now_s += LIMIT_S / 2
    job.stand(applied=43, open_at=43)

    assert (early, job.given) == ([], ["end"])


def test_who_asks_again_and_again_does_not_put_off_what_waits_already(job: Job) -> None:
    job.stand(applied=41, open_at=41)
    job.ask("end")

    job.now_s += LIMIT_S - 1
    job.ask("checkpoint", is_end=False)
    early = list(job.given)
    job.now_s += 1
    job.quiesce_schedule.look()

    assert (early, job.given) == ([], ["end", "checkpoint"])


def test_the_end_does_not_wait_for_a_repair_and_a_checkpoint_that_was_asked_for_does(job: Job) -> None:
    job.stand(applied=41, open_at=41)
    job.ask("checkpoint", is_end=False)
    job.ask("end")

    job.node.job.phase = recovery.JobPhase.FREEZING
    job.quiesce_schedule.look()
    in_repair, is_reported = list(job.given), job.has_leader_heard
    job.node.job.phase = recovery.JobPhase.RUNNING
    job.stand(applied=42, open_at=41)

    assert (in_repair, is_reported) == (["end"], True)
    assert job.given == ["end", "checkpoint"]


@pytest.mark.parametrize("lacks", ["a way to save its state", "ranks", "open boundaries"])
def test_a_job_that_has_nothing_to_wait_for_ends_at_once(job: Job, lacks: str) -> None:
    job.why_not_saved = lacks if lacks == "a way to save its state" else ""
    job.stand(applied=41, open_at=0 if lacks == "open boundaries" else 41)
    if lacks == "ranks":
        job.node.slots = []

    job.ask("end")

    assert job.given == ["end"]
