"""Iterators in a replay: moved to the lost rank's item, whatever of them finds its place by itself."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich import progress
from tqdm import tqdm

from ttprun.rank.position.iterator_seek import Mover

SKIP = 4
LENGTH = 12


class Batches(Iterator[str]):
    """What a loader hands out, from the batch `number` on."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __next__(self) -> str:
        if self.number == LENGTH:
            raise StopIteration
        self.number += 1
        return f"batch {self.number - 1}"


class Loader:
    """As a DataLoader: in a replay its iterators begin at the right item.

    begins_at   items that its iterators pass over
    made        iterators that do, so far
    """

    def __init__(self, begins_at: int = 0) -> None:
        self.begins_at = begins_at
        self.made: list[Any] = []

    def __iter__(self) -> Iterator[str]:
        made = Batches(self.begins_at)
        if self.begins_at:
            self.made.append(made)
        return made

    def mover(self) -> Mover:
        return Mover(lambda: len(self.made), lambda items: any(items is known for known in self.made))


def cycled(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


KINDS: dict[str, Callable[[Loader], Any]] = {
    "itself": lambda loader: loader,
    "iterator": iter,
    "zip with a range": lambda loader: zip(range(100), loader, strict=False),
    "strict zip": lambda loader: zip(range(LENGTH), loader, strict=True),
    "zip with a count": lambda loader: zip(itertools.count(5, 2), loader, strict=False),
    "zip with another generator": lambda loader: zip((number for number in range(50)), loader, strict=False),
    "slice": lambda loader: itertools.islice(loader, 9),
    "slice that begins later": lambda loader: itertools.islice(enumerate(range(50)), 3, 9),
    "slice without an end": lambda loader: itertools.islice(loader, 0, None),
    "slice of every second one": lambda loader: itertools.islice(enumerate(range(40)), 1, 30, 2),
    "slice that is under way": lambda loader: begun(itertools.islice(enumerate(range(50)), 2, 20, 3)),
    "enumerate": lambda loader: enumerate(loader, 3),
    "enumerate of a zip": lambda loader: enumerate(zip(range(100), loader, strict=False)),
    "map": lambda loader: map(str.upper, loader),
    "map of two": lambda loader: map(lambda number, batch: f"{number} {batch}", range(100), loader),
    "filter": lambda loader: filter(None, loader),
    "zip with a filter": lambda loader: zip("abcdefghijkl", filter(None, loader), strict=False),
    "generator over it": cycled,
    "slice of a generator over it": lambda loader: itertools.islice(cycled(loader), 10),
    "slice of a zip": lambda loader: itertools.islice(zip(itertools.count(), cycled(loader), strict=False), 10),
    "chain": lambda loader: itertools.chain(loader, "abc"),
    "chain of enumerates": lambda loader: itertools.chain(enumerate(loader), enumerate("abc")),
    "slice of a chain": lambda loader: itertools.islice(itertools.chain(loader, "abc"), 10),
    "library's generator": lambda loader: progress.track(loader, disable=True),
    "library's generator over an enumerate": lambda loader: progress.track(enumerate(loader), total=9, disable=True),
    "library's generator over a zip": lambda loader: progress.track(
        zip(itertools.count(), loader, strict=False), total=9, disable=True
    ),
    "generator expression over an enumerate": lambda loader: ((batch, number) for number, batch in enumerate(loader)),
    "generator expression over a slice": lambda loader: (batch * 2 for batch in itertools.islice(loader, 9)),
    "generator expression over a chain": lambda loader: (batch for batch in itertools.chain(enumerate(loader), "ab")),
    "zip with a chain": lambda loader: zip(range(99), itertools.chain.from_iterable([loader]), strict=False),
    "bar": lambda loader: tqdm(loader, disable=True),
    "bar that is shown": lambda loader: tqdm(loader, file=io.StringIO()),
    "bar over an enumerate": lambda loader: tqdm(enumerate(loader), disable=True),
    "bar over a zip": lambda loader: tqdm(zip(range(100), loader, strict=False), disable=True),
    "enumerate of a bar over a zip": lambda loader: enumerate(
        tqdm(zip(range(100), loader, strict=False), disable=True)
    ),
    "bar over a bar over a slice": lambda loader: tqdm(tqdm(itertools.islice(loader, 9), disable=True), disable=True),
    "bar over numbers": lambda loader: tqdm(range(40), disable=True),
    "filter that drops": lambda loader: filter(lambda number: number % 3, range(40)),
    "filtered generator": lambda loader: filter(lambda number: number % 3, (number for number in range(40))),
    "pairs of one iterator": lambda loader: zip(*[iter(range(40))] * 2, strict=True),
}


def begun(items: Iterator[Any]) -> Iterator[Any]:
    next(items)
    return items


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_is_what_the_lost_rank_had_left(kind: str) -> None:
    left = list(itertools.islice(KINDS[kind](Loader()), SKIP, LENGTH))
    loader = Loader(begins_at=SKIP)
    iterable = KINDS[kind](loader)

    moved = loader.mover().moved(iter(iterable), SKIP)

    assert list(itertools.islice(moved, LENGTH - SKIP)) == left[: LENGTH - SKIP]
    assert left


class Passing(Iterator[str]):
    """An object that asks a loader's iterator, which it has from its beginning on."""

    def __init__(self, loader: Loader) -> None:
        self.batches = iter(loader)

    def __next__(self) -> str:
        return next(self.batches)


def test_an_object_that_has_begun_its_loader_is_not_asked_for_what_that_has_passed_over() -> None:
    loader = Loader(begins_at=SKIP)
    made = Passing(loader)

    assert next(loader.mover().moved(made, SKIP)) == f"batch {SKIP}"


LATER: dict[str, Callable[[Loader], Any]] = {
    "when the chain begins": lambda loader: itertools.chain("ab", enumerate(loader)),
    "when the chain comes to it": lambda loader: itertools.chain("ab", loader),
    "when a generator comes to it": lambda loader: (item for part in ("ab", loader) for item in part),
}


@pytest.mark.parametrize("begun", LATER)
def test_a_loader_behind_something_else_begins_as_far_behind_as_the_lost_ranks_had(begun: str) -> None:
    left = list(LATER[begun](Loader()))[SKIP:]
    loader = Loader(begins_at=SKIP - len("ab"))
    iterable = LATER[begun](loader)

    moved = loader.mover().moved(iter(iterable), SKIP)

    assert list(moved) == left


@pytest.mark.parametrize("length", [3, SKIP, SKIP + 1])
def test_a_slice_ends_where_it_would_have_ended(length: int) -> None:
    loader = Loader(begins_at=SKIP)

    moved = loader.mover().moved(itertools.islice(zip(range(99), loader, strict=False), length), SKIP)

    assert len(list(moved)) == max(0, length - SKIP)


def test_an_end_that_is_passed_is_the_end() -> None:
    assert list(Loader().mover().moved(iter(range(2)), SKIP)) == []


def test_a_strict_zip_stays_strict() -> None:
    loader = Loader(begins_at=SKIP)

    with pytest.raises(ValueError, match="zip"):
        list(loader.mover().moved(zip(range(99), loader, strict=True), SKIP))
