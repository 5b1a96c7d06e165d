"""A `for` over a generator in which the optimizer's steps are taken, and over one that has a loop of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ttprun.capture.position import loops


def new_site() -> loops.Site:
    return loops.Site("script:1:0", loops.Extent((7, 0), (7, 9), (8, 4), (8, 8)))


def test_a_step_that_is_taken_while_an_item_is_made_is_met_again_in_making_that_item() -> None:
    records: list[dict[str, Any]] = []
    met: list[tuple[int, Any]] = []

    def training(of: list[loops.Loop], first: int) -> Iterator[int]:
        for number in range(first, 6):
            met.append((of[0].position, of[0].current))
            records.append(of[0].record())
            yield 10 * number

    holder: list[loops.Loop] = []
    holder.append(loops.Loop(new_site(), None, training(holder, 0)))
    items = iter(holder[0])
    assert [next(items) for _ in range(4)] == [0, 10, 20, 30]
    recorded, met[:] = records[3], []

    again: list[loops.Loop] = []
    jump = loops.Jump(new_site(), recorded, training(again, 3))
    again.append(jump)

    assert list(jump) == [30, 40, 50]
    assert met == [(3, 20), (4, 30), (5, 40)]
