"""Limits that count as a process that gets its share of the machine counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ttprun.protocol import patience
from ttprun.protocol.board import LEADER, Board, Field
from ttprun.protocol.patience import LOOK_S, Patience, is_agent_awake


class Clock:
    """A machine whose time a test lets pass, with so many threads for each processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.crowd = 100.0, 1.0
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(patience, "crowd", lambda: self.crowd)

    def looks_until_over(self, waits: Patience, times: float = 1.0) -> int:
        """Looks, 0.5 s apart, until the limit is over."""
        for number in range(1, 1000):
            self.now_s += 0.5
            if waits.look(times):
                return number
        raise AssertionError("never over")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_limit_is_over_in_time_on_a_machine_that_does_nothing_else(clock: Clock) -> None:
    assert clock.looks_until_over(Patience(5.0)) == 11


def test_on_a_machine_with_four_threads_a_core_it_is_four_times_as_long(clock: Clock) -> None:
    clock.crowd = 4.0

    assert clock.looks_until_over(Patience(5.0)) == 41


def test_who_ends_a_job_has_no_more_time_on_a_busy_machine(clock: Clock) -> None:
    clock.crowd = 4.0

    assert clock.looks_until_over(Patience(5.0, is_scaled=False), times=10.0) == 11


def test_a_look_that_comes_late_counts_as_one_in_time(clock: Clock) -> None:
    waits = Patience(5.0)

    clock.now_s += 1000.0

    assert not waits.look()
    assert clock.looks_until_over(waits) == 2 * (5.0 - LOOK_S) + 1


def test_time_in_which_the_other_one_could_not_act_does_not_count(clock: Clock) -> None:
    is_awake = [False]
    waits = Patience(5.0, counts=lambda: is_awake[0])
    for _ in range(100):
        clock.now_s += 0.5
        assert not waits.look()

    is_awake[0] = True

    assert clock.looks_until_over(waits) == 11


def test_an_agent_that_has_not_looked_around_of_late_is_not_awake() -> None:
    _, board = Board.create(1)
    before = is_agent_awake(board)  # it has not begun to
    looked: Callable[[float], None] = lambda ago_s: board.set(  # noqa: E731
        LEADER, Field.AGENT_NS, patience.time.monotonic_ns() - int(ago_s * 1e9)
    )

    looked(0.1)
    now = is_agent_awake(board)
    looked(10.0)

    assert (before, now, is_agent_awake(board)) == (True, True, False)
