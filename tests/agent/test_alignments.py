"""Whose gradients count after a repair that was equal to rounding alone."""

from __future__ import annotations

import pytest

from ttprun.agent.lead.repairs import plan_alignment as plan
from ttprun.protocol.from_rank import GroupJournal

ALL = (0, 1, 2)


def used(*numbers: int, ranks: tuple[int, ...] = ALL) -> dict[str, GroupJournal]:
    """What a rank has completed of four collectives of one group, whose results are lost."""
    return {"world": GroupJournal(list(ranks), ["allreduce"] * 4, taken=list(numbers))}


@pytest.mark.parametrize(
    ("journals", "given", "found"),
    [
        ({0: used(), 2: used()}, [], {}),
        ({0: used(0, 1), 2: used(0, 1)}, [], {1: 0}),
        ({0: used(0), 2: used(0, 1)}, [], {0: 2, 1: 2}),
        ({0: used(0), 2: used(0, 1)}, [("world", 1)], {1: 0}),
        ({0: used(0, 2), 2: used(0, 1)}, [], {1: 0, 2: 0}),
        ({0: used(0, 1), 2: used(0, 1)}, [("world", 0), ("world", 1)], {}),
        ({0: used(0, ranks=(0, 2)), 2: used(0, ranks=(0, 2))}, [], {}),
    ],
    ids=[
        "nothing used",
        "all used alike",
        "one farther",
        "what is given",
        "out of order",
        "all given",
        "another group",
    ],
)
def test_the_survivor_counts_that_has_used_most_of_what_nobody_has_any_more(
    journals: dict[int, dict[str, GroupJournal]], given: list[tuple[str, int]], found: dict[int, int]
) -> None:
    assert plan(journals, given, [ALL], lost=[1]) == found


def test_ranks_that_hold_something_else_give_no_gradients() -> None:
    journals = {0: used(0), 2: used(0)}

    assert plan(journals, [], [(0, 2), (1,)], lost=[1]) == {}
