"""The file that says how far a run was, and when."""

from pathlib import Path

import pytest

from ttprun.observe import events
from ttprun.observe.events import History, Point, read_history


class Clock:
    """In place of the module `time`; the test moves it."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(events, "time", clock)
    return clock


def test_the_last_step_is_noted_with_the_time_at_which_it_was_done_not_at_which_the_run_has_ended(
    clock: Clock, tmp_path: Path
) -> None:
    steps = History(tmp_path / "history.csv")

    steps.note(1)
    clock.now_s = 1000.5
    steps.note(2)
    clock.now_s = 1007.0
    steps.note(2, is_last=True)

    assert read_history(tmp_path / "history.csv") == [Point(1000.0, 1), Point(1000.5, 2)]


def test_points_are_a_second_apart_and_only_where_the_step_has_changed(clock: Clock, tmp_path: Path) -> None:
    steps = History(tmp_path / "history.csv")

    for after_s, step in ((0.0, 0), (0.5, 1), (1.0, 2), (2.5, 2), (3.0, 3)):
        clock.now_s = 1000.0 + after_s
        steps.note(step)

    assert read_history(tmp_path / "history.csv") == [Point(1000.0, 0), Point(1001.0, 2), Point(1003.0, 3)]
