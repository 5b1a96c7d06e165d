"""Iterators and generators in variables go on where the lost rank's stood, or are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.capture.user_values import (
    count_up,
    doubled,
)
from tests.capture.values.carrying import (
    carry,
    is_refused,
)
from ttprun.capture.values import CannotRestoreError


def test_a_suspended_generator_of_the_user_goes_on_where_the_lost_ranks_stood() -> None:
    lost, live = count_up(10), count_up(0)
    assert [next(lost) for _ in range(5)] == [11, 12, 13, 14, 15]
    next(live)

    carry({"numbers": lost}, {"numbers": live})

    assert next(live) == 16


def test_a_generator_that_stands_at_another_line_is_refused() -> None:
    lost, live = count_up(10), count_up(0)
    next(lost)

    with pytest.raises(CannotRestoreError, match="numbers is a generator that stands elsewhere"):
        carry({"numbers": lost}, {"numbers": live})


def in_a_loop(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:  # noqa: UP028
        yield item


def in_a_handler(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        try:
            raise KeyError
        except KeyError:
            yield item


def in_a_handler_that_leaves(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        try:
            raise KeyError
        except KeyError:
            yield item
            yield from items
            return


ITERATORS: dict[str, Callable[[], Any]] = {
    "list iterator": lambda: iter([1, 2, 3, 4, 5]),
    "itertools.count": lambda: itertools.count(1),
    "itertools.cycle": lambda: itertools.cycle([1, 2, 3]),
    "zip": lambda: zip("abcde", range(5), strict=True),
    "map": lambda: map(abs, [1, 2, 3, 4, 5]),
    "enumerate": lambda: enumerate("abcde"),
    "reversed": lambda: reversed([1, 2, 3, 4]),
    "generator of a library's, in a loop": lambda: in_a_loop([1, 2, 3, 4, 5]),
    "generator of a library's, in a handler": lambda: in_a_handler([1, 2, 3, 4, 5]),
    "generator of a library's, in a handler, over a generator": lambda: in_a_handler(count_up(10)),
    "generator of a library's, in a handler that leaves the loop": lambda: in_a_handler_that_leaves(iter([1, 2, 3, 4])),
    "generator expression of the user's": lambda: doubled([1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_in_a_variable_goes_on_where_the_lost_ranks_stood_or_is_refused(kind: str) -> None:
    lost, live = ITERATORS[kind](), ITERATORS[kind]()
    for _ in range(3):
        next(lost)
    next(live)
    here = {"stream": live}

    refused = is_refused({"stream": lost}, here)

    assert refused or next(here["stream"]) == next(lost)


@pytest.mark.parametrize(
    "make",
    [lambda: itertools.chain([1, 2], [3, 4, 5]), lambda: itertools.islice([1, 2, 3, 4, 5], 5), lambda: iter({1: 2, 3: 4, 5: 6, 7: 8}),
     lambda: filter(None, [1, 2, 3, 4]), lambda: zip([1, 2, 3, 4], itertools.count(), strict=False), lambda: iter(range(9))],
)  # fmt: skip
def test_an_iterator_of_any_other_kind_goes_on_or_is_refused(make: Callable[[], Any]) -> None:
    lost, here = make(), {"stream": make()}
    next(lost)
    next(lost)

    refused = is_refused({"stream": lost}, here)

    assert refused or list(here["stream"]) == list(lost)


def test_an_iterator_at_its_end_is_at_its_end_and_its_list_is_left_alone() -> None:
    items = [1, 2, 3]
    lost = iter([1, 2, 3])
    assert list(lost) == [1, 2, 3]
    here = {"stream": iter(items), "items": items}

    carry({"stream": lost, "items": [1, 2, 3]}, here)

    assert list(here["stream"]) == []
    assert here["items"] is items
    assert items == [1, 2, 3]
