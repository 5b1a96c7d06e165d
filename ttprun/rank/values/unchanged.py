"""The one change tracker: results computed from an object at an earlier boundary are valid while it is unchanged.

`Unchanged` decides whether lists and dictionaries hold the same objects as before: of a dictionary by a version from
torch (CPython's own up to 3.11, a watcher's later); if that has changed, the items are compared, and so are those of
lists. Of many dictionaries the versions are read directly in memory, all at once, where the interpreter has them there.
`LongList` does the same for one list of perhaps millions of items, within microseconds where the kernel reports writes
(written_pages.py). `Remembered` holds results, as long as they are used at each boundary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

import numpy
from torch._C._dynamo import guards

from ttprun.rank.process import looks
from ttprun.rank.values.written_pages import Watched, watch

V = TypeVar("V")
# Without it in torch, everything is compared.
version_of: Callable[[dict[Any, Any]], int] = getattr(
    guards, "dict_version", lambda dictionary: 0
)  # changes with each change of the dictionary


class _Probe:
    pass


def _are_counted(version_of: Callable[[dict[Any, Any]], int]) -> bool:
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


ARE_COUNTED = _are_counted(version_of)


_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_ADDRESS_AT = list.__basicsize__ - 2 * _POINTER_BYTES  # before it: object's head and length; after it: allocated room
_compare: Any = ctypes.PyDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_WATCHED_ITEMS = 1 << 15  # fewer are compared within some microseconds
_LOOKS = 3  # boundaries at which a list must have been unchanged before its memory is watched


def _address_of(one: list[Any]) -> int:
    """Where a list keeps the addresses of its items, one after the other; 0 if it has none."""
    return ctypes.c_void_p.from_address(id(one) + _ADDRESS_AT).value or 0


def _are_addresses_known() -> bool:
    """Whether this interpreter keeps lists in the form that `_address_of` takes for granted."""
    if list.__basicsize__ != 5 * _POINTER_BYTES:
        return False
    for probe in ([object()], [object() for _ in range(100)]):
        found = (ctypes.c_void_p * len(probe)).from_address(_address_of(probe))
        if list(found) != list(map(id, probe)):
            return False
    return True


HAVE_ADDRESSES = _are_addresses_known()


def begins_with(items: Any, first: list[Any]) -> bool:
    """Whether a list begins with the very objects in another one; also for a view of a dictionary."""
    if type(items) is not list or not HAVE_ADDRESSES:
        return len(first) <= len(items) and all(map(is_, items, first))
    return len(first) <= len(items) and not (
        first and _compare(_address_of(items), _address_of(first), len(first) * _POINTER_BYTES)
    )


_VERSION_AT = 3 * ctypes.sizeof(ctypes.c_void_p)  # in a dictionary: after the object's head and the number of items
_LONG = 64  # items of a list, from which on its memory is compared
_MANY = 512  # dictionaries; the versions of fewer are asked for one by one


def _version_in_memory(dictionary: dict[Any, Any]) -> int:
    return ctypes.c_uint64.from_address(id(dictionary) + _VERSION_AT).value


class _Versions:
    """Versions of many dictionaries, read where each keeps its own; they must live as long as this."""

    def __init__(self, dictionaries: list[dict[Any, Any]]) -> None:
        addresses = numpy.fromiter(map(id, dictionaries), numpy.uint64, len(dictionaries))
        lowest = int(addresses.min())
        self._index = ((addresses - numpy.uint64(lowest)) >> numpy.uint64(3)).astype(numpy.intp)
        words = (ctypes.c_uint64 * (int(self._index.max()) + 1)).from_address(lowest + _VERSION_AT)
        self._words: Any = numpy.frombuffer(words, numpy.uint64)  # type: ignore[call-overload]  # most of it must not be read
        self._known = self._words.take(self._index)

    def changed(self) -> list[int]:
        """The places of those that have changed since the last call."""
        now = self._words.take(self._index)
        if numpy.array_equal(now, self._known):
            return []
        found: list[int] = numpy.flatnonzero(now != self._known).tolist()
        self._known = now
        return found


ARE_IN_MEMORY = ARE_COUNTED and _are_counted(_version_in_memory)  # by 3.11 and 3.12


class Unchanged:
    """The contents of some lists and dictionaries, which are kept alive."""

    __slots__ = ("_contents", "_dictionaries", "_items", "_lengths", "_lists", "_long", "_many", "_versions")

    def __init__(self, containers: Iterable[list[Any] | dict[Any, Any]] = ()) -> None:
        self._dictionaries: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._many: _Versions | None = None
        self._contents: list[list[Any]] = []
        self._lists: list[list[Any]] = []
        self._lengths: list[int] = []
        self._items: list[Any] = []
        self._long: list[tuple[list[Any], list[Any]]] = []  # lists compared by their memory, with what they held
        self.add(containers)

    def add(self, containers: Iterable[list[Any] | dict[Any, Any]]) -> None:
        """Add containers with their current contents."""
        for one in containers:
            if isinstance(one, dict):
                self._dictionaries.append(one)
                self._versions.append(version_of(one))
                self._contents.append([*one, *one.values()])
                self._many = None
            elif len(one) >= _LONG and type(one) is list and HAVE_ADDRESSES:
                self._long.append((one, one.copy()))
            else:
                self._lists.append(one)
                self._lengths.append(len(one))
                self._items += one

    def holds(self) -> bool:
        """Whether all hold the same objects, in the same order."""
        for at in self._changed():
            one = self._dictionaries[at]
            if not _are_the_same([*one, *one.values()], self._contents[at]):
                self._many = None  # asked again, it must say the same
                return False
        if self._lists and not (
            list(map(len, self._lists)) == self._lengths
            and all(map(is_, chain.from_iterable(self._lists), self._items))
        ):
            return False
        return not self._long or all(len(one) == len(held) and begins_with(one, held) for one, held in self._long)

    def _changed(self) -> Iterable[int]:
        """The places of dictionaries that may have changed: those with another version than before."""
        if not ARE_COUNTED:
            return range(len(self._dictionaries))
        if self._many is not None:
            return self._many.changed()
        are_many = len(self._dictionaries) >= _MANY and ARE_IN_MEMORY
        many = _Versions(self._dictionaries) if are_many else None  # before they are compared
        versions = list(map(version_of, self._dictionaries))
        if versions == self._versions:
            self._many = many
            return ()
        return self._differing(versions)

    def _differing(self, versions: list[int]) -> Iterator[int]:
        pairs = zip(versions, self._versions, strict=True)
        yield from [at for at, (now, before) in enumerate(pairs) if now != before]
        self._versions = versions  # all of them hold what they held


def _are_the_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


class LongList:
    """One list that is looked at again and again. Its memory, if watched, shows whether an item was exchanged."""

    __slots__ = ("_looks", "_place", "_watched")

    def __init__(self) -> None:
        self._looks = 0
        self._place = (0, 0)  # address of its items, and their number
        self._watched: Watched | None = None

    def begins_with(self, items: Any, first: list[Any]) -> bool:
        """As the function; `first` must be a list that is only ever appended to."""
        if type(items) is not list or len(items) < _WATCHED_ITEMS or not HAVE_ADDRESSES:
            return begins_with(items, first)
        place = (_address_of(items), len(items))
        if place != self._place:
            self.end()
            self._place, self._looks = place, 0
        if self._watched is not None and self._watched.is_untouched():
            return len(first) <= len(items)
        self._looks += 1
        if self._looks == _LOOKS:
            self._watched = watch(place[0], place[1] * _POINTER_BYTES)
        elif self._watched is not None:
            self._watched.note()  # before the comparison: what is written from here on is seen the next time
        is_same = begins_with(items, first)
        if not is_same:  # that it is untouched from here on would prove nothing
            self.end()
            self._looks = 0
        return is_same

    def end(self) -> None:
        """Stop watching."""
        if self._watched is not None:
            self._watched.end()
            self._watched = None

    def __del__(self) -> None:
        self.end()


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


def begin_boundary() -> None:
    """Begin a boundary for all results."""
    for one in _all:
        one.begin_boundary()


def forget() -> None:
    """Forget everything."""
    begin_boundary()
    begin_boundary()
    looks.forget()
