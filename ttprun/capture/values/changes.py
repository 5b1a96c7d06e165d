"""Changes: results computed from an object at an earlier boundary are valid while it is unchanged.

`Unchanged` decides whether lists, dictionaries and objects hold the same objects as before: of a dictionary by a
version from torch (CPython's own up to 3.11, a watcher's later); if that has changed, the items are compared, and so
are those of lists, of a long one by the addresses of its items. `Remembered` holds results, as long as they are used at
each boundary.

What has never changed is looked at in turns (`Turns`): the one schedule of all that is too much to look at at each
boundary. All of a thing is looked at until it was the same LOOKS times, and from then on a part of it, the one that was
looked at least recently. Things share the time of a boundary: at most PARTS parts of all of them are looked at.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from operator import call, is_
from typing import Any, Generic, TypeVar

from torch._C._dynamo import guards

from ttprun.introspect import safe_reads

LOOKS = 3  # whole looks in a row that have found nothing, before turns begin
PARTS = 4  # that are looked at at a boundary, of all things; each takes some 50 microseconds
ALL, NOTHING = -1, -2  # in place of the number of a part


class Clock:
    """What all that is looked at in turns follows.

    boundary   number of the boundary, of all in this process
    records    that this run of the script has begun
    is_whole   nothing is left to its turn: what is recorded now is needed for more than evidence covers
    asking     things in turns that have asked at this boundary so far
    asked      the same of the boundary before
    """

    boundary = records = asking = asked = 0
    is_whole = False

    @classmethod
    def advance(cls) -> None:
        """The next boundary begins."""
        cls.boundary += 1
        cls.asked, cls.asking = cls.asking, 0


class Turns:
    """Which part of one thing is to be looked at."""

    __slots__ = ("_asked_at", "_looks", "_next", "_seen")

    def __init__(self) -> None:
        self._looks = self._next = 0
        self._asked_at = -1  # in turns
        self._seen: list[int] = []  # the boundary at which each part was looked at

    def due(self, parts: int) -> int:
        """ALL, the number of one of so many parts, or NOTHING: what to look at now. `note` is to be called then."""
        if self._looks < LOOKS or Clock.is_whole or parts <= 1:
            return ALL
        if self._asked_at == Clock.boundary:
            return NOTHING
        self._asked_at = Clock.boundary
        place, Clock.asking = Clock.asking, Clock.asking + 1
        if len(self._seen) == 1:
            self._seen, self._next = self._seen * parts, 0
        self._seen += [Clock.boundary] * (parts - len(self._seen))  # what was added was looked at for it
        every = -(-Clock.asked // PARTS) or 1
        return self._next if (Clock.boundary + place) % every == 0 else NOTHING

    def note(self, due: int, is_same: bool) -> bool:
        """What was due has been looked at. Returns `is_same`."""
        if not is_same:
            self._looks, self._seen = 0, []
        elif due == ALL:
            self._looks += self._seen != [Clock.boundary]
            self._seen = [Clock.boundary]
        elif due != NOTHING:
            self._seen[due] = Clock.boundary
            self._next = (due + 1) % len(self._seen)
        return is_same

    @property
    def age(self) -> int:
        """How many boundaries ago each part was looked at, at most."""
        return Clock.boundary - min(self._seen) if self._seen else 0


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


_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_ADDRESS_AT = list.__basicsize__ - 2 * _POINTER_BYTES  # before it: object's head and length; after it: allocated room
_compare: Any = ctypes.PyDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _address_of(items: list[Any]) -> int:
    """Where a list keeps the addresses of its items, one after the other; 0 if it has none."""
    return ctypes.c_void_p.from_address(id(items) + _ADDRESS_AT).value or 0


def _are_addresses_known() -> bool:
    """Whether this interpreter keeps lists in the form that `_address_of` takes for granted."""
    if list.__basicsize__ != 5 * _POINTER_BYTES:
        return False
    for probe in ([object()], [object() for _ in range(100)]):
        addresses = (ctypes.c_void_p * len(probe)).from_address(_address_of(probe))
        if list(addresses) != list(map(id, probe)):
            return False
    return True


HAVE_ADDRESSES = _are_addresses_known()


def begins_with(items: Any, first: list[Any], begin: int = 0, count: int | None = None) -> bool:
    """Whether a list begins with the very objects in another one; also for a view of a dictionary.

    begin, count   of a list, only so many of these are compared
    """
    if type(items) is not list or not HAVE_ADDRESSES:
        return len(first) <= len(items) and all(map(is_, items, first))
    count = len(first) - begin if count is None else min(count, len(first) - begin)
    offset = begin * _POINTER_BYTES
    return len(first) <= len(items) and not (
        count > 0 and _compare(_address_of(items) + offset, _address_of(first) + offset, count * _POINTER_BYTES)
    )


_LONG = 64  # items of a list, from which on its memory is compared
# What is looked at in turns, and how many of each kind are a part: long lists, dictionaries, short lists, objects.
_TURNS = (64, 2048, 128, 512)
_MOST_ITEMS = 1 << 16  # of the lists in a part
_MOST_LENGTHS = 1024  # of lists that are asked for their lengths each time


# Of containers, the first that fits: their methods are called, not those of a class of the script's.
BASES = (OrderedDict, dict, list, set, deque)
_factory_of: Any = vars(defaultdict)["default_factory"].__get__


class Unchanged:
    """The contents of some lists, dictionaries and objects, which are kept alive.

    turns   of `holds_in_turn`
    """

    _CONTENTS = (
        *("_contents", "_dictionaries", "_getters", "_held", "_items", "_lengths", "_lists", "_long"),
        *("_lengths_of_long", "_of_objects", "_objects", "_starts", "_typed", "_types", "_versions"),
    )
    __slots__ = (*_CONTENTS, "_plan", "turns")

    def __init__(self, containers: Iterable[list[Any] | dict[Any, Any]] = ()) -> None:
        self._dictionaries: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._contents: list[list[Any]] = []
        self._lists: list[Any] = []
        self._lengths: list[int] = []
        self._starts: list[int] = []  # of each list's items in `_items`
        self._items: list[Any] = []
        self._long: list[list[Any]] = []  # lists that are compared by their memory
        self._held: list[list[Any]] = []  # what each of them held
        self._lengths_of_long: list[int] = []
        self._objects: list[Any] = []
        self._of_objects: list[dict[str, Any]] = []  # the dictionary of each
        self._getters: list[Callable[[Any], dict[str, Any]]] = []  # of these dictionaries
        self._typed: list[Any] = []  # objects of which the type counts
        self._types: list[type] = []
        self.turns = Turns()
        self._plan: _Plan | None = None
        self.add(containers)

    @classmethod
    def joined(cls, parts: Iterable[Unchanged]) -> Unchanged:
        """Those of several, with the contents that are known of them."""
        made = cls()
        for part in parts:
            count = len(made._items)
            for name in cls._CONTENTS:
                getattr(made, name).extend(getattr(part, name))
            made._starts[len(made._starts) - len(part._starts) :] = [start + count for start in part._starts]
        return made

    def add(self, containers: Iterable[Any]) -> None:
        """Add lists, dictionaries, sets, deques or `Slots` with their current contents."""
        containers = list(containers)
        plain = [container for container in containers if type(container) is dict]
        self._dictionaries += plain
        self._versions += map(version_of, plain)
        self._contents += [[*container, *container.values()] for container in plain]
        for container in containers:
            if type(container) is dict:
                continue
            if issubclass(type(container), dict):
                self._dictionaries.append(container)
                self._versions.append(version_of(container))
                self._contents.append(_contents_of(container))
                if issubclass(type(container), OrderedDict | defaultdict):  # order and factory are not counted
                    self._add_items(container if type(container) is OrderedDict else _Items(container))
            elif type(container) is list and len(container) >= _LONG and HAVE_ADDRESSES:
                self._long.append(container)
                self._held.append(container.copy())
                self._lengths_of_long.append(len(container))
            else:
                self._add_items(container if type(container) in (*BASES, Slots) else _Items(container))

    def add_objects(self, objects: Iterable[tuple[Any, dict[str, Any]]], typed: Iterable[Any] = ()) -> None:
        """Add objects.

        objects   each with the dictionary of all its attributes
        typed     those of which only the type counts
        """
        pairs = list(objects)
        values, dictionaries = [value for value, _ in pairs], [attributes for _, attributes in pairs]
        self._objects += values
        self._of_objects += dictionaries
        self._getters += [safe_reads.dictionary_getter(type(value)) or safe_reads.attributes_of for value in values]
        self.add(dictionaries)
        self._typed += values
        self._typed += typed
        self._types = list(map(type, self._typed))

    def _add_items(self, items: Any) -> None:
        self._lists.append(items)
        self._lengths.append(len(items))
        self._starts.append(len(self._items))
        self._items += items

    def holds_in_turn(self) -> bool:
        """As `holds`, of very many that have been the same for some boundaries only of those whose turn it is."""
        plan = self._plan = self._plan or _Plan()
        plan.extend(self._lengths_of_long, self._lengths, len(self._dictionaries), len(self._typed))
        due = self.turns.due(plan.parts)
        return self.turns.note(due, due == NOTHING or (self.holds() if due == ALL else self._look(plan, due)))

    def _look(self, plan: _Plan, part: int) -> bool:
        """Whether those hold that are in one part."""
        if len(self._lists) <= _MOST_LENGTHS and list(map(len, self._lists)) != self._lengths:
            return False
        if len(self._long) <= _MOST_LENGTHS and list(map(len, self._long)) != self._lengths_of_long:
            return False
        pieces, of_dictionaries, of_lists, of_objects = plan.of(part)
        typed, objects = self._typed[of_objects], self._objects[of_objects]
        if not all(map(is_, map(type, typed), self._types[of_objects])):
            return False
        if not all(map(is_, map(call, self._getters[of_objects], objects), self._of_objects[of_objects])):
            return False
        for at, begin in pieces:
            items, items_before = self._long[at], self._held[at]
            if len(items) != len(items_before) or not begins_with(items, items_before, begin, _MOST_ITEMS):
                return False
        dictionaries = self._dictionaries[of_dictionaries]
        if not ARE_COUNTED or list(map(version_of, dictionaries)) != self._versions[of_dictionaries]:
            if not all(map(_are_the_same, map(_contents_of, dictionaries), self._contents[of_dictionaries])):
                return False
            self._versions[of_dictionaries] = map(version_of, dictionaries)
        lists, lengths = self._lists[of_lists], self._lengths[of_lists]
        if not lists:
            return True
        begin = self._starts[of_lists.start]
        items = self._items[begin : begin + sum(lengths)]
        return list(map(len, lists)) == lengths and all(map(is_, chain.from_iterable(lists), items))

    def changed(self) -> set[int]:
        """Ids of those that do not hold now: each is looked at."""
        ids = {
            id(dictionary)
            for dictionary, contents in zip(self._dictionaries, self._contents, strict=True)
            if not _are_the_same(_contents_of(dictionary), contents)
        }
        for short, length, begin in zip(self._lists, self._lengths, self._starts, strict=True):
            if not _are_the_same(list(short), self._items[begin : begin + length]):
                ids.add(short.container_id if isinstance(short, _Items | Slots) else id(short))
        ids.update(
            id(items)
            for items, items_before in zip(self._long, self._held, strict=True)
            if len(items) != len(items_before) or not begins_with(items, items_before)
        )
        ids.update(id(value) for value, kind in zip(self._typed, self._types, strict=True) if type(value) is not kind)
        for value, attributes, getter in zip(self._objects, self._of_objects, self._getters, strict=True):
            if id(attributes) in ids or getter(value) is not attributes:
                ids.add(id(value))
        return ids

    def holds(self) -> bool:
        """Whether all hold the same objects, in the same order."""
        changed: Iterable[int] = ()  # places of dictionaries that may have: those of another version than before
        if not ARE_COUNTED:
            changed = range(len(self._dictionaries))
        elif (versions := list(map(version_of, self._dictionaries))) != self._versions:
            changed = self._differing(versions)
        for at in changed:
            if not _are_the_same(_contents_of(self._dictionaries[at]), self._contents[at]):
                return False
        if self._lists and not (
            list(map(len, self._lists)) == self._lengths
            and all(map(is_, chain.from_iterable(self._lists), self._items))
        ):
            return False
        if self._long and not (
            list(map(len, self._long)) == self._lengths_of_long and all(map(begins_with, self._long, self._held))
        ):
            return False
        if self._typed and not all(map(is_, map(type, self._typed), self._types)):
            return False
        return not self._objects or all(map(is_, map(call, self._getters, self._objects), self._of_objects))

    def _differing(self, versions: list[int]) -> Iterator[int]:
        pairs = zip(versions, self._versions, strict=True)
        yield from [at for at, (now, before) in enumerate(pairs) if now != before]
        self._versions = versions  # all of them hold what they held


class _Plan:
    """In which parts an `Unchanged` is looked at. What is added to it costs time once, for itself alone.

    parts   how many there are
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int]] = []  # of long lists: which one, and the first of some of its items
        self._weights: list[int] = []  # items of each piece
        self._count_of_long = 0
        self._of_pieces, self._of_lists = _Slices(_TURNS[0]), _Slices(_TURNS[2])
        self._counts = (0, 0)
        self.parts = 0

    def extend(self, lengths_of_long: list[int], lengths: list[int], dictionaries: int, objects: int) -> None:
        """Take up what was added: lengths of all long and short lists, and how many of the others there are."""
        for at in range(self._count_of_long, len(lengths_of_long)):
            begins = range(0, lengths_of_long[at], _MOST_ITEMS)
            self._pieces += [(at, begin) for begin in begins]
            self._weights += [min(_MOST_ITEMS, lengths_of_long[at] - begin) for begin in begins]
        self._count_of_long = len(lengths_of_long)
        self._of_pieces.extend(self._weights)
        self._of_lists.extend(lengths)
        self._counts = -(-dictionaries // _TURNS[1]), -(-objects // _TURNS[3])
        self.parts = max(len(self._of_pieces.begins), len(self._of_lists.begins), *self._counts)

    def of(self, part: int) -> tuple[list[tuple[int, int]], slice, slice, slice]:
        """(long list, first of some of its items) of each piece, and which dictionaries, short lists and objects."""
        begins = [part % max(1, count) * turn for count, turn in zip(self._counts, _TURNS[1::2], strict=True)]
        of_dictionaries, of_objects = (
            slice(begin, begin + turn) for begin, turn in zip(begins, _TURNS[1::2], strict=True)
        )
        return self._pieces[self._of_pieces.of(part)], of_dictionaries, self._of_lists.of(part), of_objects


class _Slices:
    """Slices of at most so many things in a row, and of no more weight than _MOST_ITEMS unless it is one thing.

    begins   of each
    """

    def __init__(self, most: int) -> None:
        self.begins: list[int] = []
        self._most, self._count, self._weight = most, 0, 0

    def extend(self, weights: list[int]) -> None:
        """Take up what was added to the weights."""
        for own in weights[self._count :]:
            is_full = bool(self.begins) and self._count - self.begins[-1] == self._most
            if not self.begins or is_full or self._weight + own > _MOST_ITEMS:
                self.begins.append(self._count)
                self._weight = 0
            self._weight += own
            self._count += 1

    def of(self, part: int) -> slice:
        """One of them; of a part beyond them, again from the first on."""
        if not self.begins:
            return slice(0, 0)
        at = part % len(self.begins)
        return slice(self.begins[at], self.begins[at + 1] if at + 1 < len(self.begins) else self._count)


class Slots:
    """What an object holds in its slots, as a container; for an empty slot, the slot itself."""

    def __init__(self, value: Any, slots: Iterable[Any]) -> None:
        self._one, self._slots = value, tuple(slots)
        self.container_id = id(value)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Any]:
        for slot in self._slots:
            try:
                yield slot.__get__(self._one)
            except AttributeError:
                yield slot


class _Items:
    """What a container holds whose class may have methods of its own: items, or keys and the factory of others."""

    def __init__(self, container: Any) -> None:
        self._one = container
        self.container_id = id(container)
        self._base: Any = next(base for base in BASES if issubclass(type(container), base))
        self._has_factory = issubclass(type(container), defaultdict)

    def __len__(self) -> int:
        return int(self._base.__len__(self._one)) + self._has_factory

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = self._base.__iter__(self._one)
        return chain((_factory_of(self._one),), items) if self._has_factory else items


def _contents_of(dictionary: dict[Any, Any]) -> list[Any]:
    """Keys and values of a dictionary, without its class's own methods."""
    if type(dictionary) in (dict, OrderedDict):
        return [*dictionary, *dictionary.values()]
    base = safe_reads.base_of(dictionary)
    return [*base.__iter__(dictionary), *base.values(dictionary)]


def _are_the_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


class Remembered(Generic[V]):
    """Results by key; those that were not used at the previous boundary are forgotten (`begin_boundary`).

    now, before   those that were used at this boundary, and at the previous one
    """

    def __init__(self) -> None:
        self.now: dict[Hashable, V] = {}
        self.before: dict[Hashable, V] = {}
        _all.append(self)

    def get(self, key: Hashable) -> V | None:
        """The result of a key, or None."""
        result = self.now.get(key)
        if result is None:
            result = self.before.get(key)
            if result is not None:
                self.now[key] = result
        return result

    def keep(self, key: Hashable, made: V) -> None:
        """Keep a result for the next boundary."""
        self.now[key] = made


_all: list[Remembered[Any]] = []


def begin_boundary() -> None:
    """Begin a boundary: forget the results that were not used since the last one."""
    Clock.advance()
    for results in _all:
        results.before, results.now = results.now, {}


def forget() -> None:
    """Forget everything."""
    begin_boundary()
    begin_boundary()
    Clock.records = 0
    safe_reads.forget()
