"""Iterators around a DataLoader: what they count goes on as in the lost rank, or is refused; never does it differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from tests.capture import user_values
from tests.capture.values.carrying import as_the_recorder_writes_them
from ttprun.capture import values
from ttprun.capture.data import loaders
from ttprun.capture.position import iterables, loops
from ttprun.capture.position.placeholders import PlaceholderUsedError
from ttprun.capture.records.packing import LoopRecord
from ttprun.capture.values import CannotRestoreError, Restore, Snapshot, restore_loop

LOST = 6  # items that the loop has handed out in the lost rank
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


class QuiesceSchedule(NamedTuple):
    """A loop in the middle of its items.

    items   what the `for` asks for them: without it the loop has been left
    """

    loop: loops.Loop
    items: Items


class InReplay(_SingleProcessDataLoaderIter):
    """A loader's iterator that knows in a replay how many batches the lost rank's had handed out."""

    __next__ = loaders.wrap_next_in_replay(_SingleProcessDataLoaderIter.__next__)


def batches_behind(passed_over: int) -> Items:
    """A loader's iterator that begins behind so many batches."""
    batches: Any = InReplay(DataLoader(list(range(20))))  # type: ignore[arg-type]
    for _ in range(passed_over):
        next(batches)
    batches._ttprun_passed_over = passed_over
    return batches


def stand(made: Callable[[Items], Any], items: int) -> QuiesceSchedule:
    """A loop over what is made of a loader's iterator, behind some items."""
    loop = loops.Loop(
        loops.Site("train.py:7:0", loops.Extent((7, 0), (7, 9), (8, 4), (8, 8))),
        None,
        made(batches_behind(0)),
    )
    following = iter(loop)
    for _ in range(items):
        next(following)
    return QuiesceSchedule(loop, following)


@pytest.fixture
def replay() -> Iterator[None]:
    """A replay that has not come to its first boundary."""
    loops.take_over(lambda site, frame: None, lambda site, token, iterable: iterable)
    yield
    loops.give_back()


def stand_again(made: Callable[[Items], Any], recorded: dict[str, Any], before: int = 0) -> QuiesceSchedule:
    """The loop of a replay in the item in which the recorded one stood.

    before   items that come before those of the loader
    """
    passed_over = recorded.position - 1 - before
    loop = loops.Jump(
        loops.Site("train.py:7:0", loops.Extent((7, 0), (7, 9), (8, 4), (8, 8))),
        recorded,
        made(batches_behind(passed_over)),
    )
    following = iter(loop)
    next(following)
    return QuiesceSchedule(loop, following)


def carry(lost: loops.Loop, here: loops.Loop) -> list[str]:
    """Put what the lost rank's loop runs over into another; returns the mismatches."""
    snapshot = Snapshot({}, iterables.followed([lost]))
    fields = msgspec.msgpack.decode(values.pack(snapshot.loop(lost)), type=LoopRecord)
    restore = Restore(as_the_recorder_writes_them(snapshot.blobs), is_comparing=True)
    restore_loop(restore, here, fields.over)
    return restore.doubts


GO_ON: dict[str, Callable[[Items], Any]] = {
    "a library's generator": counted,
    "one within another": counted_by_parts,
    "one within an enumerate": lambda batches: enumerate(counted(batches)),
    "one within a zip": lambda batches: zip(counted(batches), itertools.repeat("-"), strict=False),
    "one that asks an enumerate by hand": numbered_by_hand,
    "the user's generator within an enumerate": lambda batches: enumerate(user_values.counted_batches(batches)),
    "the user's object": user_values.CountedBatches,
    "the user's object within an enumerate": lambda batches: enumerate(user_values.CountedBatches(batches)),
    "the user's object that gathers": user_values.GatheredBatches,
    "an enumerate in a chain": lambda batches: itertools.chain(enumerate(batches), "abc"),
    "the user's generator within a library's": lambda batches: counted(user_values.counted_batches(batches)),
    "a slice in a library's loop": limited,
    "an enumerate in a library's loop": numbered,
    "an enumerate in a variable and a loop": numbered_twice,
    "an enumerate in a user's generator expression": user_values.numbered_batches,
    "a library's generator in a user's generator expression": lambda batches: user_values.copied(counted(batches)),
    "one within an enumerate in a user's expression": lambda batches: user_values.copied(enumerate(counted(batches))),
    "a user's expression in a library's in a user's": lambda batches: user_values.copied(
        counted(user_values.copied(batches))
    ),
    "the user's object in a library's in a user's": lambda batches: user_values.copied(
        counted(user_values.CountedBatches(batches))
    ),
    "the user's generator in a library's in a user's": lambda batches: user_values.copied(
        counted(user_values.counted_batches(batches))
    ),
    "a slice in a library's generator": lambda batches: passed_on(itertools.islice(batches, 9)),
    "an enumerate in a library's generator": lambda batches: passed_on(enumerate(batches)),
    "a zip in a library's generator": lambda batches: passed_on(zip(range(3, 30), batches, strict=False)),
}


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("kind", GO_ON)
def test_what_is_counted_around_a_loader_goes_on_as_in_the_lost_rank(kind: str) -> None:
    lost = stand(GO_ON[kind], LOST)
    here = stand_again(GO_ON[kind], replace(lost.loop.record(), lead=1))

    mismatches = carry(lost.loop, here.loop)
    loops.give_back()

    assert mismatches == []
    assert next(here.items) == next(lost.items)


@pytest.mark.usefixtures("replay")
def test_pairs_are_read_ahead_and_go_on_as_in_the_lost_rank() -> None:
    lost = stand(itertools.pairwise, LOST)
    here = stand_again(itertools.pairwise, replace(lost.loop.record(), lead=1))

    assert carry(lost.loop, here.loop) == []
    assert next(here.items) == next(lost.items)


@pytest.mark.usefixtures("replay")
def test_what_comes_before_a_loader_is_taken_for_itself() -> None:
    def made(batches: Items) -> Items:
        return itertools.chain("ab", enumerate(batches))

    lost = stand(made, LOST)
    here = stand_again(made, replace(lost.loop.record(), lead=1), before=2)

    assert carry(lost.loop, here.loop) == []
    assert next(here.items) == next(lost.items)


@pytest.mark.usefixtures("replay")
def test_a_cycle_in_its_first_round_would_gather_placeholders_and_is_refused_by_its_place() -> None:
    lost = stand(itertools.cycle, LOST)
    here = stand_again(itertools.cycle, replace(lost.loop.record(), lead=1))

    with pytest.raises(CannotRestoreError, match=r"^train\.py:7:0"):
        carry(lost.loop, here.loop)


NEEDED: dict[str, Callable[[Items], Any]] = {
    "groups": lambda batches: itertools.groupby(batches, key=lambda batch: batch.item() // 2),
    "numbers": lambda batches: itertools.accumulate(map(int, batches)),
}


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("kind", NEEDED)
def test_what_needs_the_data_of_batches_that_are_passed_over_ends_the_replay(kind: str) -> None:
    lost = stand(NEEDED[kind], LOST)

    with pytest.raises((PlaceholderUsedError, TypeError)):
        stand_again(NEEDED[kind], replace(lost.loop.record(), lead=1))


@pytest.mark.usefixtures("replay")
def test_what_a_library_has_made_of_batches_that_were_passed_over_is_not_used() -> None:
    lost = stand(gathered, LOST)
    here = stand_again(gathered, replace(lost.loop.record(), lead=1))

    assert carry(lost.loop, here.loop) == []
    loops.give_back()
    with pytest.raises(PlaceholderUsedError):
        next(here.items)


@pytest.mark.parametrize(
    "made",
    [
        lambda batches: batches,
        lambda batches: enumerate(zip(range(99), batches, strict=False)),
        lambda batches: itertools.islice(batches, 9),
        lambda batches: [1, 2, 3, 4, 5, 6, 7],
        lambda batches: enumerate(counted(batches)),
    ],
    ids=["the loader's iterator", "an enumerate of a zip", "a slice", "a list", "a library's generator"],
)
def test_of_what_its_position_reveals_nothing_more_is_recorded(made: Callable[[Items], Any]) -> None:
    active = stand(made, LOST)

    assert iterables.over(active.loop) is None


def test_a_cycle_in_a_later_round_is_left_to_the_replay_which_has_seen_the_first_one_too() -> None:
    active = stand(itertools.cycle, 20 + LOST)

    assert iterables.over(active.loop) is None


def test_a_loop_that_was_left_runs_over_nothing() -> None:
    loop = stand(lambda batches: enumerate(user_values.CountedBatches(batches)), LOST).loop

    assert iterables.over(loop) is None
