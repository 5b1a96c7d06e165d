"""Whether containers and objects are as they were at an earlier boundary. What need not be walked then: `kept.py`.

A `Piece` is some values and all below them; a table of kinds says how each is looked at. A dictionary has a version
from torch (CPython's own up to 3.11, a watcher's later); if that has changed, the items are compared, and so are those
of lists, of a long one by the addresses of its items. `Remembered` holds results, as long as they are used at each
boundary. Tensors and arrays are looked at elsewhere (`large.follow`), as are long lists (`long_items.py`), datasets
(`data_trees.py`) and the layout of modules (`modules.py`).

What has never changed is looked at in turns (`Turns`): the one schedule of all that is too much to look at at each
boundary. All of a thing is looked at until it was the same LOOKS times, and from then on a part of it, the one that was
looked at least recently. Things share the time of a boundary: at most PARTS parts of all of them are looked at.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
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
_MOST_ITEMS = 1 << 16  # of the lists in a part
_MOST_LENGTHS = 1024  # of lists that are asked for their lengths each time


# Of containers, the first that fits: their methods are called, not those of a class of the script's.
BASES = (OrderedDict, dict, list, set, deque)
_factory_of: Any = vars(defaultdict)["default_factory"].__get__


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


@dataclass(eq=False)
class Kind:
    """How things of one kind are looked at.

    are_same  whether things are as they were, given lists of these, of what was seen and of notes, which it may renew
    most      things in a part
    see       what is seen of a thing, and compared
    note      what else is noted of it, to look faster
    weigh     the weight of what was seen
    limit     weight of a part, unless it is one thing
    """

    are_same: Callable[[list[Any], list[Any], list[Any]], bool]
    most: int
    see: Callable[[Any], Any] = list
    note: Callable[[Any], Any] | None = None
    weigh: Callable[[Any, Any], int] = lambda thing, seen: 0
    limit: int = _MOST_ITEMS


class Tracker:
    """Some things of one kind, which are kept alive, with what was seen of each."""

    __slots__ = ("_begins", "_weighed", "_weight", "kind", "notes", "seen", "things")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.things: list[Any] = []
        self.seen: list[Any] = []
        self.notes: list[Any] = []
        self._begins: list[int] = []  # of the parts
        self._weighed = self._weight = 0  # things that are in a part; weight of the last part

    def add(self, things: Iterable[Any], seen: Iterable[Any] | None = None, notes: Iterable[Any] = ()) -> None:
        """Follow further things.

        seen, notes   of each as it was; None: as it is now
        """
        self.things += things
        if seen is None:
            seen, notes = map(self.kind.see, things), map(self.kind.note, things) if self.kind.note else ()
        self.seen += seen
        self.notes += notes

    def count_parts(self) -> int:
        """In how many parts they are looked at in turn. What was added costs time once, for itself alone."""
        begins, first = self._begins, self._weighed
        for own in map(self.kind.weigh, self.things[first:], self.seen[first:]):
            is_full = bool(begins) and self._weighed - begins[-1] == self.kind.most
            if not begins or is_full or self._weight + own > self.kind.limit:
                begins.append(self._weighed)
                self._weight = 0
            self._weight += own
            self._weighed += 1
        return len(begins)

    def part(self, number: int) -> tuple[int, int]:
        """(begin, end) of a part; of one beyond them, again from the first on."""
        at = number % len(self._begins)
        return self._begins[at], self._begins[at + 1] if at + 1 < len(self._begins) else self._weighed

    def holds(self, begin: int, end: int) -> bool:
        """Whether some of the things are as they were."""
        notes = self.notes[begin:end]
        are_same = self.kind.are_same(self.things[begin:end], self.seen[begin:end], notes)
        self.notes[begin:end] = notes
        return are_same

    def changed(self) -> Iterator[Any]:
        """Those that are not as they were: each is looked at."""
        for begin, end in map(self.part, range(self.count_parts())):
            if not self.holds(begin, end):
                yield from (self.things[at] for at in range(begin, end) if not self.holds(at, at + 1))


def _are_dictionaries_same(things: list[Any], seen: list[Any], versions: list[Any]) -> bool:
    now = list(map(version_of, things))
    if now != versions or not ARE_COUNTED:
        for thing, contents, version, before in zip(things, seen, now, versions, strict=True):
            if (version != before or not ARE_COUNTED) and not _are_the_same(_contents_of(thing), contents):
                return False
        versions[:] = now
    return True


def _are_items_same(things: list[Any], seen: list[Any], notes: list[Any]) -> bool:
    if list(map(len, things)) != list(map(len, seen)):
        return False
    return all(map(is_, chain(*things), chain(*seen)))


def _are_long_same(things: list[Any], seen: list[Any], begins: list[Any]) -> bool:
    is_as_long = list(map(len, things)) == list(map(len, seen))
    return is_as_long and all(map(begins_with, things, seen, begins, repeat(_MOST_ITEMS)))


def _are_answers_same(things: list[Any], seen: list[Any], questions: list[Any]) -> bool:
    try:
        return all(map(is_, map(call, questions, things), seen))
    except TypeError:  # one is of another class now
        return False


def _contents_of(dictionary: dict[Any, Any]) -> list[Any]:
    """Keys and values of a dictionary, without its class's own methods."""
    if type(dictionary) in (dict, OrderedDict):
        return [*dictionary, *dictionary.values()]
    base = safe_reads.base_of(dictionary)
    return [*base.__iter__(dictionary), *base.values(dictionary)]


def _are_the_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


def _weigh(thing: Any, seen: list[Any]) -> int:
    return min(_MOST_ITEMS, len(seen))


DICTIONARIES = Kind(_are_dictionaries_same, 2048, _contents_of, version_of)
ITEMS = Kind(_are_items_same, 128, weigh=_weigh)
LONG_LISTS = Kind(_are_long_same, 64, weigh=_weigh)  # long lists; notes: the first of the items that are looked at
ANSWERS = Kind(_are_answers_same, 1024)  # objects, each with its type or its dictionary; notes: what answers with that


class Piece:
    """Some values and all below them, which are looked at as one.

    trackers  of all in them, by their kinds
    turns     of `holds_in_turn`
    numbers   of the objects in them, by their ids; objects are only ever added
    """

    __slots__ = ("_apart_from", "numbers", "trackers", "turns")

    def __init__(self, containers: Iterable[Any] = ()) -> None:
        self.trackers: dict[Kind, Tracker] = {}
        self.turns = Turns()
        self.numbers: dict[int, int] = {}
        self._apart_from: dict[int, tuple[dict[int, int], int, int]] = {}  # rows that hold nothing of these
        self.add(containers)

    def track(self, kind: Kind, things: Sequence[Any], *as_it_was: Iterable[Any]) -> None:
        """Follow further things of a kind; `as_it_was`: `seen` and `notes` of `Tracker.add`."""
        if things:
            if kind not in self.trackers:
                self.trackers[kind] = Tracker(kind)
            self.trackers[kind].add(things, *as_it_was)

    def join(self, other: Piece) -> None:
        """Follow what another piece follows, too."""
        for kind, tracker in other.trackers.items():
            self.track(kind, tracker.things, tracker.seen, tracker.notes)

    def add(self, containers: Iterable[Any]) -> None:
        """Follow lists, dictionaries, sets, deques or `Slots` with their current contents."""
        dictionaries, others = [], []
        for container in containers:
            kind = type(container)
            if issubclass(kind, dict):
                dictionaries.append(container)
            if kind is list and len(container) >= _LONG and HAVE_ADDRESSES:
                begins = range(0, len(container), _MOST_ITEMS)
                self.track(LONG_LISTS, [container] * len(begins), [container.copy()] * len(begins), begins)
            elif kind is not dict and (not issubclass(kind, dict) or issubclass(kind, OrderedDict | defaultdict)):
                # Of dictionaries, order and factory are not counted.
                others.append(container if kind in (*BASES, Slots) else _Items(container))
        self.track(DICTIONARIES, dictionaries)
        self.track(ITEMS, others)

    def follow(self, trace: Any) -> None:
        """Follow all that nodes depend on: a `Trace` (kept.py)."""
        values, dictionaries = [value for value, _ in trace.objects], [attributes for _, attributes in trace.objects]
        getters = [safe_reads.dictionary_getter(type(value)) or safe_reads.attributes_of for value in values]
        self.add([*trace.contents, *dictionaries])
        typed = [*values, *trace.typed]
        self.track(ANSWERS, typed, map(type, typed), [type] * len(typed))
        self.track(ANSWERS, values, dictionaries, getters)

    def holds(self) -> bool:
        """Whether all is as it was: containers hold the same objects, in the same order."""
        try:
            for kind in self.trackers:  # with few calls: this is asked of each object at each boundary
                tracker = self.trackers[kind]
                if not kind.are_same(tracker.things, tracker.seen, tracker.notes):
                    return False
        except RuntimeError:  # another thread is changing it
            return False
        return True

    def holds_in_turn(self, is_whole: bool = False) -> bool:
        """As `holds`, of very much that has been the same for some boundaries only of what is due.

        is_whole   nothing is left to its turn
        """
        parts = map(Tracker.count_parts, self.trackers.values())
        due = ALL if is_whole else self.turns.due(max(parts, default=0))
        return self.turns.note(due, due == NOTHING or (self.holds() if due == ALL else self._look(due)))

    def _look(self, part: int) -> bool:
        """Whether that is as it was which is in one part."""
        try:
            for kind, tracker in self.trackers.items():
                is_short = kind in (ITEMS, LONG_LISTS) and len(tracker.things) <= _MOST_LENGTHS
                if is_short and list(map(len, tracker.things)) != list(map(len, tracker.seen)):
                    return False
                if not tracker.holds(*tracker.part(part)):
                    return False
        except RuntimeError:
            return False
        return True

    def changed(self) -> set[int]:
        """Ids of what is not as it was."""
        ids = {
            thing.container_id if isinstance(thing, _Items | Slots) else id(thing)
            for tracker in self.trackers.values()
            for thing in tracker.changed()
        }
        objects = self.trackers.get(ANSWERS)
        pairs = zip(objects.things, objects.seen, strict=True) if objects else ()
        return ids | {id(value) for value, answer in pairs if id(answer) in ids}

    def is_apart(self, snapshot: Any) -> bool:
        """Whether a walk has met nothing of it."""
        own = self.numbers
        if not snapshot.numbers.keys().isdisjoint(own.keys()):
            return False
        if len(self._apart_from) > len(snapshot.rows):  # those that are gone are not kept alive
            self._apart_from.clear()
        for rows in snapshot.rows:
            marks = (rows, len(own), len(rows))  # objects are only ever added to both
            before = self._apart_from.get(id(rows))
            if before is None or before[0] is not rows or before[1:] != marks[1:]:
                if not rows.keys().isdisjoint(own.keys()):
                    return False
                self._apart_from[id(rows)] = marks
        return True


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
