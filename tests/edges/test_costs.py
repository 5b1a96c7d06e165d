"""What protection takes of a step is measured in some steps, shown, and told once."""

from __future__ import annotations

import pytest

from ttprun.introspect import costs
from ttprun.introspect.costs import COLLECTIVES, PARTS, RECORD, Costs

MS = 1_000_000


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.ns = 1

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(costs.time, "thread_time_ns", made)
    monkeypatch.setattr(costs.time, "perf_counter_ns", made)
    return made


def train(known: Costs, clock: Clock, steps: int) -> int:
    """Steps of 20 ms: a record of 2, a collective of 5, of which its backend takes 4. Returns how many were measured."""
    measured = 0
    for step in range(1, steps + 1):
        known.begin(step, lambda: False)
        measured += known.is_on
        began = known.now() if known.is_on else 0
        clock.ns += 2 * MS
        if began:
            known.add(RECORD, began)
        issued = known.now() if known.is_on else 0
        clock.ns += 1 * MS
        given = known.now() if known.is_on else 0
        clock.ns += 4 * MS
        if issued:
            known.leave_out(COLLECTIVES, given)
            known.add(COLLECTIVES, issued)
        clock.ns += 13 * MS
    return measured


def test_a_step_in_eight_is_measured_and_its_parts_are_published(clock: Clock) -> None:
    cells = [0] * (1 + len(PARTS))

    measured = train(Costs(cells), clock, 220)

    assert 20 <= measured <= 40
    assert cells == [20 * MS, 2 * MS, 0, 1 * MS, 0, 0, 0]


def test_what_is_above_the_budget_is_told_with_the_part_that_takes_most(clock: Clock) -> None:
    known = Costs()

    train(known, clock, 220)

    assert known.over(0.01).startswith(
        "protection takes 3.0 ms of a step of 20.0 ms (15.0%; the budget is 1.0%), 2.0 ms of it for the record"
    )


@pytest.mark.parametrize(
    ("share", "steps"), [(0.2, 220), (0.0, 220), (0.01, 40)], ids=["kept", "none", "not yet known"]
)
def test_nothing_is_told_if_the_budget_is_kept_or_there_is_none(clock: Clock, share: float, steps: int) -> None:
    known = Costs()

    train(known, clock, steps)

    assert known.over(share) == ""
