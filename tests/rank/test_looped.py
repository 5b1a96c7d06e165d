"""Iterators around a DataLoader: what they count goes on as in the lost rank, or is refused; never does it differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from torch.utils.data import DataLoader

from tests.rank import user_values
from tests.rank.values.carrying import as_the_recorder_writes_them
from ttprun.rank import values
from ttprun.rank.position import iterables, loops
from ttprun.rank.position.iterator_seek import Mover
from ttprun.rank.values import CannotRestoreError, Restore, Snapshot, restore_loop

LOST, HERE = 6, 2  # items that the loop has handed out in the lost rank, and the replay's around the same batch
Items = Iterator[Any]


# Functions of this file are none of the user's: so they are a library's.


def counted(batches: Items) -> Items:
    number = 0
    for batch in batches:
        number += 2
        yield [number, batch]


def counted_by_parts(batches: Items) -> Items:
    yield from counted(batches)


def passed_on(batches: Items) -> Items:
    for batch in batches:
        yield [batch]


def gathered(batches: Items) -> Items:
    seen = []
    for batch in batches:
        seen.append(batch.item())
        yield [sum(seen), batch]


def limited(batches: Items) -> Items:
    for batch in itertools.islice(batches, 9):
        yield [batch]


def numbered(batches: Items) -> Items:
    for number, batch in enumerate(batches):
        yield [number, batch]


def numbered_by_hand(batches: Items) -> Items:
    pairs = enumerate(batches)
    while True:
        yield list(next(pairs))


def numbered_twice(batches: Items) -> Items:
    pairs = enumerate(batches)
    for number, batch in pairs:
        yield [number, batch]


class Standing(NamedTuple):
    """A loop in the middle of its items.

    items   what the `for` asks for them: without it the loop has been left
    """

    loop: loops.Loop
    items: Items


def loader_at(begins_at: int) -> Items:
    """A loader's iterator that has passed over so many batches."""
    batches = iter(DataLoader(list(range(20))))  # type: ignore[arg-type]
    for _ in range(begins_at):
        next(batches)
    return batches


def stand(made: Callable[[Items], Any], begins_at: int, items: int) -> Standing:
    """A loop over what is made of a loader's iterator, behind some items."""
    batches = loader_at(begins_at)
    loop = loops.Loop(loops.Site("train.py:7:0", range(7, 9)), None, made(batches))
    following = iter(loop)
    for _ in range(items):
        next(following)
    return Standing(loop, following)


def carry(lost: loops.Loop, here: loops.Loop) -> list[str]:
    """Put what the lost rank's loop runs over into another; returns the mismatches."""
    snapshot = Snapshot({}, iterables.followed([lost]))
    fields = values.unpack(values.pack(snapshot.loop(lost)))
    restore = Restore(as_the_recorder_writes_them(snapshot.blobs), is_comparing=True)
    restore_loop(restore, here, fields)
    return restore.mismatches


GO_ON: dict[str, Callable[[Items], Any]] = {
    "a library's generator": counted,
    "one within another": counted_by_parts,
    "one within an enumerate": lambda batches: enumerate(counted(batches)),
    "one within a zip": lambda batches: zip(counted(batches), itertools.repeat("-"), strict=False),
    "one that gathers": gathered,
    "one that asks an enumerate by hand": numbered_by_hand,
    "the user's generator within an enumerate": lambda batches: enumerate(user_values.counted_batches(batches)),
    "the user's object": user_values.CountedBatches,
    "the user's object within an enumerate": lambda batches: enumerate(user_values.CountedBatches(batches)),
    "an enumerate in a chain": lambda batches: itertools.chain(enumerate(batches), "abc"),
    "a running total": lambda batches: itertools.accumulate(map(int, batches)),
    "the user's generator within a library's": lambda batches: counted(user_values.counted_batches(batches)),
}


def without_enumerate(kind: str, item: Any) -> Any:
    return item[1] if kind.endswith("an enumerate") else item


@pytest.mark.parametrize("kind", GO_ON)
def test_what_is_counted_around_a_loader_goes_on_as_in_the_lost_rank(kind: str) -> None:
    lost = stand(GO_ON[kind], 0, LOST)
    here = stand(GO_ON[kind], LOST - HERE, HERE)  # as the loader has found its place by itself

    mismatches = carry(lost.loop, here.loop)

    assert mismatches == []
    assert without_enumerate(kind, next(here.items)) == without_enumerate(kind, next(lost.items))


REFUSED: dict[str, Callable[[Items], Any]] = {
    "a slice in a library's loop": limited,
    "an enumerate in a library's loop": numbered,
    "an enumerate in a variable and a loop": numbered_twice,
    "an enumerate in a user's generator expression": user_values.numbered_batches,
    "a cycle in its first round": itertools.cycle,
    "pairs": lambda batches: itertools.pairwise(batches),
    "groups": lambda batches: itertools.groupby(batches, key=lambda batch: batch.item() // 2),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_made_to_stand_as_in_the_lost_rank_is_refused_by_its_place(kind: str) -> None:
    lost = stand(REFUSED[kind], 0, LOST)
    here = stand(REFUSED[kind], LOST - HERE, HERE)

    with pytest.raises(CannotRestoreError, match=r"^train\.py:7:0"):
        carry(lost.loop, here.loop)


@pytest.mark.parametrize("kind", ["a slice in a library's loop", "an enumerate in a library's loop"])
def test_what_stands_there_already_is_not_refused(kind: str) -> None:
    lost = stand(REFUSED[kind], 0, LOST)
    here = stand(REFUSED[kind], 0, LOST)

    assert carry(lost.loop, here.loop) == []
    assert next(here.items) == next(lost.items)


@pytest.mark.parametrize(
    "made",
    [
        lambda batches: batches,
        lambda batches: enumerate(zip(range(99), batches, strict=False)),
        lambda batches: itertools.islice(batches, 9),
        lambda batches: [1, 2, 3, 4, 5, 6, 7],
    ],
    ids=["the loader's iterator", "an enumerate of a zip", "a slice", "a list"],
)
def test_of_what_its_position_tells_nothing_more_is_recorded(made: Callable[[Items], Any]) -> None:
    standing = stand(made, 0, LOST)

    assert iterables.over(standing.loop) is None


# What is around the loader's iterator, and how many items come before those of the loader.
MOVED: dict[str, tuple[Callable[[Items], Any], int]] = {
    "a slice in a library's generator": (lambda batches: passed_on(itertools.islice(batches, 9)), 0),
    "an enumerate in a library's generator": (lambda batches: passed_on(enumerate(batches)), 0),
    "a zip in a library's generator": (lambda batches: passed_on(zip(range(3, 30), batches, strict=False)), 0),
    "an enumerate in a generator expression": (user_values.numbered_batches, 0),
    "an enumerate in the last part of a chain": (lambda batches: itertools.chain("ab", enumerate(batches)), 2),
}


@pytest.mark.parametrize("kind", MOVED)
def test_what_a_replay_has_moved_around_a_loader_stands_as_in_the_lost_rank(kind: str) -> None:
    made, before = MOVED[kind]
    lost = stand(made, 0, LOST)
    batches = loader_at(LOST - 1 - before)
    mover = Mover(lambda: 1, lambda items: items is batches)
    jump = loops.Jump(loops.Site("train.py:7:0", range(7, 9)), lost.loop.record(), made(batches), mover)
    items = iter(jump)
    next(items)

    mismatches = carry(lost.loop, jump)

    assert mismatches == []
    assert next(items) == next(lost.items)


def test_a_cycle_in_a_later_round_is_left_to_the_replay_which_has_seen_the_first_one_too() -> None:
    standing = stand(itertools.cycle, 0, 20 + LOST)

    assert iterables.over(standing.loop) is None


def test_what_a_library_makes_of_anything_but_a_loader_is_left_to_the_replay() -> None:
    standing = stand(lambda batches: enumerate(counted(iter("abcdefgh"))), 0, LOST)

    assert iterables.over(standing.loop) is None


def test_a_loop_that_was_left_runs_over_nothing() -> None:
    loop = stand(lambda batches: enumerate(counted(batches)), 0, LOST).loop

    assert iterables.over(loop) is None
