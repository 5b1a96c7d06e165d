"""An iterator in a replay, moved to the item at which the lost rank's stood.

Mostly it is asked for its items until it is there. But a DataLoader's iterator begins at the right batch by itself, and
so does a generator that runs over one. Where such a one is a part of another iterator (`zip(range(n), loader)`,
`islice(zip(count(), cycle(loader)), n)`), what stands beside it has to be moved, and it has not: so iterators that are
made of others are taken apart, and put together again from parts that are in place.
"""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import CellType, GeneratorType
from typing import Any

from ttprun.rank.position import iterator_state
from ttprun.rank.position.frames import set_local

END = object()
_LOOKED_INTO = (tuple, list, dict, CellType, GeneratorType)  # beside iterators
_MOST = 200  # values
# What holds nothing but its place: however it is asked, it begins nothing.
_EMPTY: tuple[Any, ...] = ([], (), "", b"", {}, {}.items(), {}.values(), set(), range(0), range(1 << 70), reversed([]))
PLAIN = frozenset(type(iter(of)) for of in _EMPTY) | {itertools.count, itertools.repeat}


class Mover:
    """Moves iterators.

    positioned      how many iterators a replay has put at their place so far
    is_positioned   whether an iterator is one of them
    """

    def __init__(self, positioned: Callable[[], int], is_positioned: Callable[[Any], bool]) -> None:
        self._positioned = positioned
        self._is_positioned = is_positioned

    def moved(self, items: Iterator[Any], skip: int) -> Iterator[Any]:
        """An iterator whose next item is the one behind `skip` others of `items`, which is not to be used any more."""
        if self._is_positioned(items):
            return items
        bar = _bar_of(items)
        if bar is not None:
            bar.iterable = self.moved(iter(bar.iterable), skip)
            return items
        if isinstance(items, itertools.chain):
            return self._chained(items, skip)
        if self._is_moved_within(items, skip):
            return items
        parts = parts_of(items)
        if not parts and self._has_positioned(items):
            return items  # an object that began its loader when it was made, or asked for its iterator
        if not parts or len({id(part) for part in parts}) < len(parts) or _is_plain(items):
            return self._asked(items, skip)
        if isinstance(items, itertools.islice):
            return self._sliced(items, skip)
        if isinstance(items, filter):
            return self._filtered(items, skip)
        return _put_together(items, [self.moved(part, skip) for part in parts], skip)

    def _asked(self, items: Iterator[Any], skip: int) -> Iterator[Any]:
        """By its items, until it finds its place by itself while one of them is made, mostly the first."""
        if _is_plain(items):
            for _ in itertools.islice(items, skip):
                pass
            return items
        first: Any = None
        for _ in range(skip + 1):
            before = self._positioned()
            first = next(items, END)
            if first is END or self._positioned() != before:
                break
        return _begun_with([first], items)

    def _is_moved_within(self, items: Any, skip: int) -> bool:
        """Whether it is a generator that has not begun, and was given iterators that have found their place, mostly
        within others, which now are moved. Should it not take one of their items for each of its own, they stand
        elsewhere than the lost rank's, and that is seen.
        """
        found = False
        for name, given in _given_to(items).items():
            if isinstance(given, Iterator) and self._has_positioned(given):
                set_local(items.gi_frame, name, self.moved(given, skip))
                found = True
        return found

    def _chained(self, items: Any, skip: int) -> Iterator[Any]:
        """One by one: each begins only when the one before has ended."""
        links = _links_of(items)
        if not any(isinstance(link, Iterator) and self._has_positioned(link) for link in links):
            return self._asked(itertools.chain(*links) if links else items, skip)
        at = 0
        for at, link in enumerate(links):
            links[at] = iter(link)
            if self._has_positioned(links[at]):
                links[at] = self.moved(links[at], skip)
                break
            skip -= sum(1 for _ in itertools.islice(links[at], skip))
            if not skip:
                break
        left: Any = iter(tuple(links))
        iterator_state.set_state(left, at)
        made: Any = itertools.chain()
        iterator_state.set_state(made, (left,))
        found: Iterator[Any] = made
        return found

    def _sliced(self, items: Any, skip: int) -> Iterator[Any]:
        (inner, begin, stop, step), count = iterator_state.reduce(items)[1:]
        begin += skip * step
        made: Any = itertools.islice(
            self.moved(inner, skip * step), begin if stop is None else min(begin, stop), stop, step
        )
        iterator_state.set_state(made, count + skip * step)  # it counts as the lost rank's does
        found: Iterator[Any] = made
        return found

    def _filtered(self, items: Any, skip: int) -> Iterator[Any]:
        """Nobody knows how many items of its own the filter has dropped: who has found his place knows."""
        test, inner = iterator_state.reduce(items)[1]
        before = self._positioned()
        begun = self.moved(inner, 0)
        found: Iterator[Any] = filter(test, begun)
        if self._positioned() != before or self._has_positioned(inner):
            return found
        return self._asked(found, skip)

    def _has_positioned(self, items: Iterator[Any]) -> bool:
        return reaches(items, self._is_positioned, if_long=False)


def reaches(items: Any, is_it: Callable[[Any], bool], if_long: bool) -> bool:
    """Whether an iterator holds such a thing, by way of other iterators and of plain containers.

    if_long   the answer if that would take long to tell
    """
    seen: set[int] = set()
    left = [items]
    while left:
        value = left.pop()
        if is_it(value):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > _MOST:
            return if_long
        is_short = not isinstance(value, tuple | list | dict) or len(value) <= _MOST
        if is_short and (value is items or isinstance(value, _LOOKED_INTO) or hasattr(type(value), "__next__")):
            left += gc.get_referents(value)
    return False


def parts_of(items: Any) -> list[Iterator[Any]]:
    """The iterators that an iterator is made of; none if it is made of none, or does not tell."""
    kind = type(items)
    if kind not in (zip, map, filter, enumerate, itertools.islice):
        return []
    try:
        arguments = iterator_state.reduce(items)[1]
    except TypeError:  # Python 3.14: an islice does not tell
        return []
    if kind is zip:
        return list(arguments)
    if kind in (map, filter):
        return list(arguments[1:])
    return [arguments[0]] if kind is enumerate or len(arguments) == 4 else []


def _given_to(items: Any) -> dict[str, Any]:
    """The variables of a generator that has not begun: what it was called with."""
    if not isinstance(items, GeneratorType) or inspect.getgeneratorstate(items) != inspect.GEN_CREATED:
        return {}
    return inspect.getgeneratorlocals(items)


def _bar_of(items: Any) -> Any:
    """The tqdm bar whose iterator this is, if it has not begun, so that it will run over what the bar has then."""
    bar = _given_to(items).get("self")
    is_bar = type(bar).__module__.partition(".")[0] == "tqdm" and hasattr(bar, "iterable")
    return bar if is_bar and items.__name__ == "__iter__" else None


def _links_of(items: Any) -> list[Any]:
    """Takes out what a chain that has not begun will run over; none if it has begun, or does not tell."""
    try:
        state = iterator_state.reduce(items)[2]
    except (TypeError, IndexError):  # Python 3.14, or at its end
        return []
    return list(state[0]) if len(state) == 1 and type(state[0]) is type(iter(())) else []


def _is_plain(items: Iterator[Any]) -> bool:
    """Whether it and all that it is made of is plain."""
    parts = parts_of(items)
    return all(map(_is_plain, parts)) if parts else type(items) in PLAIN


def _put_together(items: Any, parts: list[Iterator[Any]], skip: int) -> Iterator[Any]:
    """A zip, map or enumerate like `items`, of these parts."""
    reduced = iterator_state.reduce(items)
    if isinstance(items, zip):
        return zip(*parts, strict=len(reduced) > 2 and bool(reduced[2]))
    if isinstance(items, map):
        return map(reduced[1][0], *parts)
    return enumerate(parts[0], reduced[1][1] + skip)


def _begun_with(first: list[Any], items: Iterator[Any]) -> Iterator[Any]:
    """The items again, of which the first one has been taken out. The script alone decides how long that one lives."""
    if first[0] is not END:
        yield first.pop()
        while (item := next(items, END)) is not END:  # `yield from` would ask it for its iterator once more
            first.append(item)
            item = None
            yield first.pop()


def unwrapped(items: Any) -> Any:
    """An iterator that was moved, without what has been put around it."""
    while isinstance(items, GeneratorType) and items.gi_code is _begun_with.__code__:
        items = inspect.getgeneratorlocals(items).get("items")
    return items
