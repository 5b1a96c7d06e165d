"""The one tracker of change: what was made of an object at a boundary before counts as long as that is as it was.

`Unchanged` tells whether lists and dictionaries hold the very objects that they held: of a dictionary a version tells,
which torch gives (CPython's own up to 3.11, a watcher's later); where that is another one, and of lists, the items are
compared. `Remembered` holds what was made, as long as it is asked for at each boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

from torch._C._dynamo import guards

V = TypeVar("V")
# Should torch come without it, all is compared.
version_of: Callable[[dict[Any, Any]], int] = getattr(
    guards, "dict_version", lambda dictionary: 0
)  # another one after each change


class _Probe:
    pass


def _are_told() -> bool:
    """Whether this interpreter gives a dictionary another version with each kind of change."""
    probe = _Probe()
    of_object, plain = vars(probe), {"x": 0}
    seen = [version_of(of_object), version_of(plain)]
    for number in range(64):  # as often as it takes the interpreter to choose its quickest way
        probe.x = number  # type: ignore[attr-defined]
        plain["x"] = number + 1
        now = [version_of(of_object), version_of(plain)]
        if any(before == after for before, after in zip(seen, now, strict=True)):
            return False
        seen = now
    del plain["x"]
    del probe.x  # type: ignore[attr-defined]
    return version_of(of_object) != seen[0] and version_of(plain) != seen[1]


ARE_TOLD = _are_told()


class Unchanged:
    """What some lists and dictionaries hold. Keeps them, and what they hold, alive."""

    __slots__ = ("_contents", "_dictionaries", "_items", "_lengths", "_lists", "_versions")

    def __init__(self, containers: Iterable[list[Any] | dict[Any, Any]] = ()) -> None:
        self._dictionaries: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._contents: list[list[Any]] = []
        self._lists: list[list[Any]] = []
        self._lengths: list[int] = []
        self._items: list[Any] = []
        self.add(containers)

    def add(self, containers: Iterable[list[Any] | dict[Any, Any]]) -> None:
        """Further ones, as they are now."""
        for one in containers:
            if isinstance(one, dict):
                self._dictionaries.append(one)
                self._versions.append(version_of(one))
                self._contents.append([*one, *one.values()])
            else:
                self._lists.append(one)
                self._lengths.append(len(one))
                self._items += one

    def holds(self) -> bool:
        """Whether all hold the very same objects, in the same order."""
        versions = list(map(version_of, self._dictionaries))
        if versions != self._versions or not ARE_TOLD:
            for at, (now, before) in enumerate(zip(versions, self._versions, strict=True)):
                if now != before or not ARE_TOLD:
                    one = self._dictionaries[at]
                    if not _are_the_same([*one, *one.values()], self._contents[at]):
                        return False
            self._versions = versions
        return not self._lists or (
            list(map(len, self._lists)) == self._lengths
            and all(map(is_, chain.from_iterable(self._lists), self._items))
        )


def _are_the_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


class Remembered(Generic[V]):
    """What was made of objects, by a key; what was not asked for at the boundary before is forgotten."""

    def __init__(self) -> None:
        self._now: dict[Hashable, V] = {}
        self._before: dict[Hashable, V] = {}
        _all.append(self)

    def get(self, key: Hashable) -> V | None:
        """What was kept under a key."""
        found = self._now.get(key)
        if found is None:
            found = self._before.get(key)
            if found is not None:
                self._now[key] = found
        return found

    def keep(self, key: Hashable, made: V) -> None:
        """Keep it for the next boundary."""
        self._now[key] = made

    def begin_boundary(self) -> None:
        """Forget what was not asked for since the last call."""
        self._before, self._now = self._now, {}


_all: list[Remembered[Any]] = []
_of_types: list[Any] = []


def of_types(function: Callable[[type], V]) -> Callable[[type], V]:
    """A decorator: what a function gives for a type is kept until the run of the script is over."""
    cached = functools.cache(function)
    _of_types.append(cached)
    return cached


def begin_boundary() -> None:
    """A boundary begins: of all that is remembered."""
    for one in _all:
        one.begin_boundary()


def forget() -> None:
    """Nothing is remembered any more."""
    begin_boundary()
    begin_boundary()
    for cached in _of_types:
        cached.cache_clear()
