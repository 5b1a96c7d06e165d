"""Jumps: how a loop begins in a replay in the middle of what it runs over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from ttprun.capture.position import loops
from ttprun.capture.records.packing import LoopRecord, pack
from ttprun.introspect import random_state


def new_site(key: str = "script:1:0") -> loops.Site:
    return loops.Site(key, loops.Extent((7, 0), (7, 9), (8, 4), (8, 8)))


def begin_at(iterable: Iterable[Any], stop_at: int) -> tuple[LoopRecord, list[Any]]:
    """The record of a loop in its `stop_at`th item, with the boundary's step seen in each; and the items left over."""
    site = new_site()
    loop = loops.Loop(site, random_state.capture(), iterable)
    items = iter(loop)
    for _ in range(stop_at):
        item = next(items)
        loops.note_steps([loop], [])
    return loop.record(), [item, *items]


KINDS: dict[str, Callable[[], Iterable[Any]]] = {
    "range": lambda: range(10),
    "range backwards": lambda: range(20, 0, -2),
    "list": lambda: ["a", "b", "c", "d", "e", "f"],
    "list with equal items": lambda: ["train", "val", "train", "val", "train", "val"],
    "list of equal numbers": lambda: [0.1, 0.1, 0.1, 0.01, 0.01, 0.01],
    "list with None": lambda: [None, 1, None, 2, None, 3],
    "list of lists": lambda: [[1], [2], [3], [4], [5]],
    "tuple": lambda: (5, 6, 7, 8, 9),
    "text": lambda: "abcdef",
    "text with equal letters": lambda: "abcabcabc",
    "bytes": lambda: b"abcabc",
    "dict": lambda: {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
    "items of a dict": lambda: {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}.items(),
    "enumerate": lambda: enumerate("abcdef"),
    "enumerate from 1": lambda: enumerate(["x", "y", "z", "u", "v"], start=1),
    "enumerate of enumerate": lambda: enumerate(enumerate("abcdef")),
    "enumerate that is under way": lambda: begun(enumerate("abcdef")),
    "zip": lambda: zip("abcdef", range(6), strict=True),
    "enumerate of zip": lambda: enumerate(zip("abcdef", range(6), strict=True)),
    "map": lambda: map(str, range(8)),
    "filter": lambda: filter(None, [1, 0, 2, 0, 3, 4, 5]),
    "iterator": lambda: iter([1, 2, 3, 4, 5, 6]),
    "generator": lambda: (x * x for x in range(9)),
    "generator of enumerate": lambda: (pair for pair in enumerate("abcdef")),
    "count": lambda: itertools.islice(itertools.count(5), 9),
    "reversed": lambda: reversed([1, 2, 3, 4, 5]),
    "tensor": lambda: torch.arange(6),
}


def begun(iterator: Any) -> Any:
    next(iterator)
    return iterator


def plain(items: Iterable[Any]) -> list[Any]:
    return [item.item() if isinstance(item, torch.Tensor) else item for item in items]


@pytest.mark.parametrize("stop_at", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_goes_on_with_the_item_in_which_the_lost_rank_stood(kind: str, stop_at: int) -> None:
    recorded, left = begin_at(KINDS[kind](), stop_at)

    jump = loops.Jump(new_site(), recorded, KINDS[kind]())

    assert plain(jump) == plain(left)


@pytest.mark.parametrize("kind", ["range", "list", "enumerate", "generator", "zip"])
def test_after_a_jump_a_loop_counts_on(kind: str) -> None:
    recorded, _ = begin_at(KINDS[kind](), 3)
    jump = loops.Jump(new_site(), recorded, KINDS[kind]())
    items = iter(jump)

    positions = [jump.position for _ in itertools.islice(items, 2)]

    assert positions == [recorded.position, recorded.position + 1]


def test_a_script_that_resumes_by_itself_goes_on_with_the_same_value() -> None:
    """The lost rank ran range(10) and stood at 6; the replacement has found a checkpoint of 4, and runs range(4, 10)."""
    recorded, left = begin_at(range(10), 7)

    jump = loops.Jump(new_site(), recorded, range(4, 10))

    assert list(jump) == left == [6, 7, 8, 9]


def test_a_script_that_resumes_behind_the_lost_ranks_item_goes_on_with_that_all_the_same() -> None:
    """The checkpoint of epoch 6 was written after the lost rank's record: the replacement runs range(7, 10)."""
    recorded, left = begin_at(range(10), 7)

    jump = loops.Jump(new_site(), recorded, range(7, 10))

    assert list(jump) == left == [6, 7, 8, 9]
    assert jump.record().bounds == [0, 10, 1]


def test_items_that_the_lost_rank_has_put_into_its_list_are_met_by_the_loop_when_the_list_is_restored() -> None:
    """`for lr in rates: train(lr); rates[i + 1] = ...`: the list is restored while the loop is under way."""
    here = [0.1, 0.2, 0.3, 0.4]
    recorded, _ = begin_at(here[:], 2)

    items = iter(loops.Jump(new_site(), recorded, here))
    first = next(items)
    here[:] = [0.1, 0.2, 9.0, 0.4, 7.0]

    assert first == 0.2
    assert list(items) == [9.0, 0.4, 7.0]


class Twice(list[int]):
    """A list that hands out each item two times."""

    def __iter__(self) -> Iterator[int]:
        return (item for item in self[:] for _ in range(2))


def test_a_list_that_hands_out_its_items_in_its_own_way_goes_on_in_that_way() -> None:
    recorded, left = begin_at(Twice([5, 6, 7]), 4)

    jump = loops.Jump(new_site(), recorded, Twice([5, 6, 7]))

    assert list(jump) == left == [6, 7, 7]


@pytest.mark.parametrize("item", ["train", ("train", 3)])
def test_a_script_that_resumes_behind_the_lost_ranks_item_of_a_list_does_not_come_by_the_place(item: Any) -> None:
    recorded, _ = begin_at([item, "val", "test"], 1)

    jump = loops.Jump(new_site(), recorded, ["val", "test"])

    assert list(jump) == []


def test_pairs_that_differ_are_seen_in_what_the_loop_says_of_itself() -> None:
    recorded, _ = begin_at(enumerate(range(5, 10)), 2)

    other, _ = begin_at(enumerate(range(6, 10)), 2)

    assert (recorded.position, recorded.current) == (2, [1, 6])
    assert (other.position, other.current) == (2, [1, 7])


def test_of_an_item_that_is_plain_in_part_that_part_is_compared_and_its_place_is_counted() -> None:
    """(3, tensor) stands for itself by its number only; another script's fourth pair may have the same one."""
    pairs = [(number, torch.ones(2)) for number in (3, 3, 4, 3, 5)]
    recorded, _ = begin_at(pairs, 3)

    same = loops.Jump(new_site(), recorded, pairs)
    later = loops.Jump(new_site(), recorded, pairs[1:])
    next(iter(same))
    next(iter(later))

    assert recorded.current == same.current == [4, None]
    assert later.current == [3, None]
    assert same.position == later.position == recorded.position


def test_a_script_that_resumes_by_itself_among_equal_values_does_not_come_by_the_place() -> None:
    """Nobody knows which of the equal values it was, so the replay must be refused."""
    recorded, _ = begin_at([0.1, 0.1, 0.1, 0.2, 0.1, 0.2], 4)

    jump = loops.Jump(new_site(), recorded, [0.2, 0.1, 0.2])

    assert list(jump) == []


def test_a_loop_that_fetches_ahead_hands_out_again_what_it_had_fetched() -> None:
    """Two items were out when the first boundary was reached, so a replay begins two items before the newest."""
    site = new_site()
    loop = loops.Loop(site, random_state.capture(), range(10))
    items = iter(loop)
    next(items)
    for _ in range(4):
        next(items)
        loops.note_steps([loop], [])

    jump = loops.Jump(site, loop.record(), range(10))

    assert list(jump) == [3, 4, 5, 6, 7, 8, 9]


class Restarted(Iterator[int]):
    """An object that begins anew whenever it is asked for its iterator."""

    def __iter__(self) -> Restarted:
        self.number = 0
        return self

    def __next__(self) -> int:
        self.number += 1
        return self.number


@pytest.mark.parametrize("items", [1, 4])
def test_a_loop_asks_for_its_iterator_once_as_python_does_and_so_does_a_jump(items: int) -> None:
    loop = loops.Loop(new_site(), None, Restarted())
    asked = iter(loop)

    assert list(itertools.islice(asked, items)) == list(range(1, items + 1))
    jump = loops.Jump(new_site(), loop.record(), Restarted())
    assert list(itertools.islice(jump, 3)) == [items, items + 1, items + 2]


def test_a_jump_behind_the_end_ends_the_loop() -> None:
    recorded, _ = begin_at(range(10), 8)

    assert list(loops.Jump(new_site(), replace(recorded, current=None), range(3))) == []


def test_an_outer_loop_restores_the_random_states_of_its_item() -> None:
    site = new_site()
    site.is_outer = site.has_steps = True
    torch.manual_seed(0)
    loop = loops.Loop(site, random_state.capture(), range(5))
    drawn = []
    for _ in itertools.islice(loop, 3):
        drawn.append(torch.rand(1).item())
    record = replace(loop.record(), lead=1)
    torch.manual_seed(99)

    items = iter(loops.Jump(site, record, range(5)))
    next(items)

    assert torch.rand(1).item() == drawn[2]


def test_a_record_of_a_loop_holds_plain_values() -> None:
    recorded, _ = begin_at(["a", "b"], 1)

    assert msgspec.msgpack.decode(pack(recorded), type=LoopRecord).current == "a"


@pytest.mark.parametrize(("now", "expected"), [(range(12), [6, 7, 8, 9, 10, 11]), (range(8), [6, 7]), (range(6), [])])
def test_with_other_arguments_a_range_goes_on_behind_its_item_up_to_the_new_end(now: range, expected: Any) -> None:
    recorded, _ = begin_at(range(10), 7)

    jump = loops.JumpToNewEnd(new_site(), recorded, now)

    assert list(jump) == expected
    assert jump.record().bounds == [0, now.stop, 1]


def test_with_other_arguments_a_range_of_another_step_does_not_come_by_the_place() -> None:
    recorded, _ = begin_at(range(10), 7)

    assert list(loops.JumpToNewEnd(new_site(), recorded, range(0, 20, 2))) == []
