"""The one change tracker: results computed from an object at an earlier boundary are valid while it is unchanged.

`Unchanged` decides whether lists and dictionaries hold the same objects as before: of a dictionary by a version from
torch (CPython's own up to 3.11, a watcher's later); if that has changed, and of lists, the items are compared.
`Remembered` holds results, as long as they are used at each boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

from torch._C._dynamo import guards

V = TypeVar("V")
# Without it in torch, everything is compared.
version_of: Callable[[dict[Any, Any]], int] = getattr(
    guards, "dict_version", lambda dictionary: 0
)  # changes with each change of the dictionary


class _Probe:
    pass


def _are_counted() -> bool:
    """Whether a dictionary's version changes with each kind of change in this interpreter."""
    probe = _Probe()
    of_object, plain = vars(probe), {"x": 0}
    seen = [version_of(of_object), version_of(plain)]
    for number in range(64):  # until the interpreter has specialized the code
        probe.x = number  # type: ignore[attr-defined]
        plain["x"] = number + 1
        now = [version_of(of_object), version_of(plain)]
        if any(before == after for before, after in zip(seen, now, strict=True)):
            return False
        seen = now
    del plain["x"]
    del probe.x  # type: ignore[attr-defined]
    return version_of(of_object) != seen[0] and version_of(plain) != seen[1]


ARE_COUNTED = _are_counted()


class Unchanged:
    """The contents of some lists and dictionaries, which are kept alive."""

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
        """Add containers with their current contents."""
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
        """Whether all hold the same objects, in the same order."""
        versions = list(map(version_of, self._dictionaries))
        if versions != self._versions or not ARE_COUNTED:
            for at, (now, before) in enumerate(zip(versions, self._versions, strict=True)):
                if now != before or not ARE_COUNTED:
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
    """Results by key; those that were not used at the previous boundary are forgotten."""

    def __init__(self) -> None:
        self._now: dict[Hashable, V] = {}
        self._before: dict[Hashable, V] = {}
        _all.append(self)

    def get(self, key: Hashable) -> V | None:
        """The result of a key, or None."""
        found = self._now.get(key)
        if found is None:
            found = self._before.get(key)
            if found is not None:
                self._now[key] = found
        return found

    def keep(self, key: Hashable, made: V) -> None:
        """Keep a result for the next boundary."""
        self._now[key] = made

    def begin_boundary(self) -> None:
        """Forget what was not used since the last call."""
        self._before, self._now = self._now, {}


_all: list[Remembered[Any]] = []
_of_types: list[Any] = []


def of_types(function: Callable[[type], V]) -> Callable[[type], V]:
    """A decorator: cache a function of a type until the run of the script is over."""
    cached = functools.cache(function)
    _of_types.append(cached)
    return cached


def begin_boundary() -> None:
    """Begin a boundary for all results."""
    for one in _all:
        one.begin_boundary()


def forget() -> None:
    """Forget everything."""
    begin_boundary()
    begin_boundary()
    for cached in _of_types:
        cached.cache_clear()
