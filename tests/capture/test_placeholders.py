"""Items that a replay passes over: whatever stands around a loader counts on, and no batch is loaded for it."""

from __future__ import annotations

import io
import itertools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rich import progress
from tqdm import tqdm

from ttprun.capture.position import loops, user_code
from ttprun.capture.position.placeholders import PLACEHOLDER, PlaceholderUsedError, hand_out, like, pass_over
from ttprun.introspect import ownership

SKIP = 4
LENGTH = 12


class Loader:
    """As a DataLoader: in a replay its iterators begin at the right item, behind placeholders for the others.

    begins_at   items that its iterators pass over
    """

    def __init__(self, begins_at: int = 0) -> None:
        self.begins_at = begins_at

    def __iter__(self) -> Iterator[str]:
        if self.begins_at:
            yield from hand_out("batch", self.begins_at)
        for number in range(self.begins_at, LENGTH):
            yield f"batch {number}"


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
    "map": lambda loader: map(operator.methodcaller("upper"), loader),
    "map of two": lambda loader: map(lambda number, batch: [number, batch], range(100), loader),
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

    items = pass_over(KINDS[kind](Loader(begins_at=SKIP)), SKIP)

    assert list(itertools.islice(items, LENGTH - SKIP)) == left[: LENGTH - SKIP]
    assert left


LATER: dict[str, Callable[[Loader], Any]] = {
    "when the chain begins": lambda loader: itertools.chain("ab", enumerate(loader)),
    "when the chain comes to it": lambda loader: itertools.chain("ab", loader),
    "when a generator comes to it": lambda loader: (item for part in ("ab", loader) for item in part),
}


@pytest.mark.parametrize("begun", LATER)
def test_a_loader_behind_something_else_begins_as_far_behind_as_the_lost_ranks_had(begun: str) -> None:
    left = list(LATER[begun](Loader()))[SKIP:]

    items = pass_over(LATER[begun](Loader(begins_at=SKIP - len("ab"))), SKIP)

    assert list(items) == left


def ahead(loader: Loader) -> Iterator[Any]:
    """In the manner of accelerate's DataLoaderShard: one batch ahead of the one that it hands out."""
    items = iter(loader)
    batch = next(items)
    for following in items:
        yield batch
        batch = following
    yield batch


def test_what_reads_ahead_takes_a_real_batch_before_the_loop_asks_for_one() -> None:
    items = enumerate(ahead(Loader(begins_at=SKIP)))

    pass_over(items, SKIP)

    assert list(items) == list(enumerate(ahead(Loader())))[SKIP:]


def test_in_a_later_epoch_all_of_its_items_and_those_before_are_passed_over() -> None:
    """The loader knows its place in its own epoch; how many items the loop drops is known by the loop."""
    items = zip(itertools.count(), cycled(Loader(begins_at=2)), strict=False)

    pass_over(items, LENGTH + 2)

    assert next(items) == (LENGTH + 2, "batch 2")


def test_several_batches_for_an_item_are_passed_over_for_each() -> None:
    batches = iter(Loader(begins_at=2 * SKIP))
    items = zip(batches, batches, strict=True)

    pass_over(items, SKIP)

    assert next(items) == ("batch 8", "batch 9")


@pytest.mark.parametrize("length", [3, SKIP, SKIP + 1])
def test_a_slice_ends_where_it_would_have_ended(length: int) -> None:
    items = itertools.islice(zip(range(99), Loader(begins_at=SKIP), strict=False), length)

    pass_over(items, SKIP)

    assert len(list(items)) == max(0, length - SKIP)


def test_an_end_that_is_passed_is_the_end() -> None:
    items = iter(range(2))

    pass_over(items, SKIP)

    assert list(items) == []


def test_a_strict_zip_stays_strict() -> None:
    items = zip(range(99), Loader(begins_at=SKIP), strict=True)

    pass_over(items, SKIP)

    with pytest.raises(ValueError, match="zip"):
        list(items)


USED: dict[str, Callable[[Any], Any]] = {
    "moved to a device": lambda batch: batch.to("cpu", non_blocking=True),
    "by torch": lambda batch: torch.stack([batch[0], torch.ones(2)]).sum(dim=0) / 2 + torch.relu(batch[1]),
    "by its size": lambda batch: 2 * batch["x"].shape[0] - batch["x"].size(0),
    "of a shape that is unpacked": lambda batch: like((torch.ones(2), {"y": [torch.ones(2)]}))[1]["y"][0].half(),
}


@pytest.mark.parametrize("kind", USED)
def test_what_is_made_of_a_placeholder_is_a_placeholder(kind: str) -> None:
    made: list[Any] = []

    pass_over((made.append(USED[kind](one)) for one in hand_out()), 1)

    assert len(made) == 1
    assert made[0] is PLACEHOLDER


NEEDED: dict[str, Callable[[Any], Any]] = {
    "its truth": lambda batch: 1 if batch.sum() > 3 else 2,
    "its number": lambda batch: batch.item() + float(batch),
    "its length": len,
    "its text": lambda batch: f"batch {batch}",
    "whether it holds something": lambda batch: 3 in batch,
    "its items": list,
    "its data": lambda batch: torch.as_tensor(batch),
}


@pytest.mark.parametrize("kind", NEEDED)
def test_code_that_needs_what_is_in_a_batch_that_is_passed_over_fails(kind: str) -> None:
    with pytest.raises((PlaceholderUsedError, TypeError, RuntimeError)):
        pass_over(map(NEEDED[kind], hand_out()), 1)


def test_a_placeholder_that_is_met_later_is_refused_with_the_reason() -> None:
    with pytest.raises(PlaceholderUsedError, match="the script uses the value of one here"):
        PLACEHOLDER.to("cpu")


def test_a_million_batches_are_passed_over_in_no_time_and_nothing_is_drawn() -> None:
    def batches() -> Iterator[Any]:
        yield from hand_out([torch.ones(1), torch.ones(1)])
        yield from range(3)

    states = torch.get_rng_state(), random.getstate()
    items = enumerate(tqdm(batches(), file=io.StringIO()))

    pass_over(items, 1_000_000)

    assert next(items) == (1_000_000, 0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_generator_with_a_loop_of_its_own_begins_in_the_middle_of_it_and_is_counted_around(tmp_path: Any) -> None:
    """The loop in it takes only one item again; what stands around it has counted all the same."""
    ownership.add_user_directory(str(tmp_path))
    source = b"def halves(numbers):\n    for number in numbers:\n        yield number / 2\n"
    code = user_code.compile_followed(source, str(tmp_path / "script.py"))
    site = list(loops.sites.values())[-1]
    record = replace(loops.Loop(site, None, range(9)).record(), position=SKIP + 1, lead=1)

    def jump(_: str, token: Any, iterable: Any) -> Any:
        return loops.Jump(site, record, iterable)

    scope: dict[str, Any] = {"__builtins__": vars(__import__("builtins")) | user_code.BUILTINS | {user_code.LOOP: jump}}
    exec(code, scope)
    items = enumerate(scope["halves"](iter(range(9))))

    pass_over(items, SKIP)

    assert list(items) == [(number, number / 2) for number in range(SKIP, 9)]


class Fetching(Iterator[Any]):
    """An object that has a batch in hand when its first item is asked for."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Fetching:
        self.batches = iter(self.loader)
        self.in_hand = [next(self.batches)]
        return self

    def __next__(self) -> Any:
        self.in_hand.append(next(self.batches))
        return self.in_hand.pop(0)


def test_an_object_that_asks_for_a_batch_when_it_is_asked_for_its_iterator_hands_out_the_right_one() -> None:
    items = pass_over(Fetching(Loader(begins_at=SKIP)), SKIP)

    assert next(items) == f"batch {SKIP}"


class Passing(Iterator[Any]):
    """An object that asks a loader's iterator, which it has from its beginning on."""

    def __init__(self, loader: Loader) -> None:
        self.batches = iter(loader)
        self.seen = 0

    def __next__(self) -> Any:
        self.seen += 1
        return next(self.batches)


def test_an_object_around_a_loader_counts_on() -> None:
    items = Passing(Loader(begins_at=SKIP))

    pass_over(items, SKIP)

    assert (next(items), items.seen) == (f"batch {SKIP}", SKIP + 1)
