"""What protection takes of a step is measured in some steps, shown, and told once."""

from __future__ import annotations

import pytest

from ttprun.introspect import costs
from ttprun.introspect.costs import COLLECTIVES, PARTS, RECORD, Ceiling, Costs

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


@pytest.mark.parametrize("parts_ms", [[0, 9, 0, 0, 0, 0], [0.9, 0, 0, 0, 0, 0]], ids=["the commit", "a small record"])
def test_nothing_is_told_if_nothing_helps(parts_ms: list[float]) -> None:
    known = Costs()
    known._counted, known._average = 99, [20 * MS, *(part_ms * MS for part_ms in parts_ms)]

    assert known.over(0.01) == ""


@pytest.mark.parametrize(
    ("records_ms", "others_ms", "budget", "at"),
    [
        ([900] * 4, 20, 0.01, [2]),  # three in a row
        ([900] * 6, 20, 0.01, [2, 5]),  # and three more, if that was not enough
        ([45] * 16, 20, 0.01, []),  # something has changed, and is walked over until it counts as unchanged
        ([60] * 13, 20, 0.01, [11]),
        ([9] * 20, 5, 0.01, []),  # much of a small step, and little in all
        ([14] * 20, 100, 0.01, []),
        ([50] * 20, 100, 0.6, []),  # the user allows more
        ([50] * 20, 20, 0.0, []),  # or all
        ([50, 1] * 20, 20, 0.01, [38]),  # every other step
        ([*[60] + [0.5] * 30] * 5, 20, 0.01, []),  # a validation
    ],
)
def test_a_record_that_is_too_dear_on_average_must_take_less(
    records_ms: list[float], others_ms: int, budget: float, at: list[int], clock: Clock
) -> None:
    ceiling, found = Ceiling(), []

    for number, record_ms in enumerate(records_ms):
        clock.ns += round((record_ms + others_ms) * MS)
        excess = ceiling.note(round(record_ms * MS), budget)
        if excess is not None:
            found.append(number)
        if ceiling.prices is not None:
            ceiling.prices.append("as the next record's walk does")

    assert found == at
