"""Long containers of dictionaries and lists, as a file of JSON gives them: packed once while they stay as they are.

To walk over such a data set at each boundary would take longer than a step. All that is in it is laid out flat, level
below level; it is as it was if each level holds the very same objects, which is seen from their addresses at once (see
unchanged.py). What lies in it can be held elsewhere too, as the row at which a loop stands is: so its objects have
numbers of their own, the same at each boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import xxhash

from ttprun.rank.values.nodes import SETTLED, is_settled
from ttprun.rank.values.snapshot import Snapshot
from ttprun.rank.values.unchanged import MAX_ITEMS, begins_with, pack_all
from ttprun.rank.values.versions import Versions

WALKS = 16  # times that what has changed, or holds other things, is walked over before it is laid out once more
_FIRST = 1 << 24  # above all numbers that a snapshot gives

_next = _FIRST
_kept: dict[tuple[int, int], Rows] = {}
_before: dict[tuple[int, int], Rows] = {}


def forget_unused() -> None:
    """A boundary begins: what was not asked for at the one before is forgotten."""
    global _kept, _before
    _before, _kept = _kept, {}


class _Level:
    """Objects that lie equally deep.

    items          all of them
    lists, dicts   those among them that hold the next level
    """

    __slots__ = ("_lengths", "_versions", "dicts", "items", "lists")

    def __init__(self, items: list[Any], lists: list[Any], dicts: list[Any]) -> None:
        self.items, self.lists, self.dicts = items, lists, dicts
        self._lengths = self._lengths_now()
        self._versions = Versions(dicts)

    def _lengths_now(self) -> list[int]:
        return [*map(len, self.lists), *map(len, self.dicts)]

    def below(self) -> list[Any]:
        """What they hold now: first what the lists do."""
        values = chain.from_iterable(map(dict.values, self.dicts))
        return [*chain.from_iterable(self.lists), *chain.from_iterable(self.dicts), *values]

    def holds_the_same(self, below: list[Any]) -> bool:
        """Whether they hold what they held.

        below   that
        """
        if self._versions.are_as_they_were():
            of_lists = list(chain.from_iterable(self.lists))
            return list(map(len, self.lists)) == self._lengths[: len(self.lists)] and begins_with(below, of_lists)
        found = self.below()
        is_same = self._lengths_now() == self._lengths and _are_the_same(found, below)
        if is_same:
            self._versions.note()
        return is_same


def _are_the_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and begins_with(items, others)


class _Walk(Snapshot):
    """Gives other numbers."""

    def __init__(self, first: int) -> None:
        super().__init__({}, is_apart=True)
        self.first = first

    def number(self, value: Any) -> int:
        number = self.numbers[id(value)] = self.first + len(self.numbers)
        self.alive.append(value)
        return number


class Rows:
    """What is known of the items of one container.

    packed    their nodes, one behind the other
    digest    of a long container's, the same in another process
    objects   the lists and dictionaries in them
    numbers   of these, by their ids
    first     the lowest of the numbers
    """

    def __init__(self, container: Any) -> None:
        self.packed = b""
        self.digest = ""
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.first = 0
        self._container = container  # whose address stays its own
        self._levels: list[_Level] = []
        self._walks_left = 0

    def can_be_used(self, items: list[Any], node_apart: Callable[[Any, int], Any]) -> bool:
        """Whether all that is known of the items is so now; they may be laid out for that.

        What changes is walked over for a while, since that takes less time; what is long can only be compared.
        """
        if self._walks_left and len(items) <= MAX_ITEMS:
            self._walks_left -= 1
            return False
        if self._levels and self._are_as_they_were(items):
            return True
        is_new = not self._levels
        is_tried = is_new or len(items) > MAX_ITEMS
        self._levels = _laid_out(self._container, items, node_apart) if is_tried else []
        if not self._levels:
            self._walks_left = WALKS
            return False
        self._walk_over(items)
        return True

    def _are_as_they_were(self, items: list[Any]) -> bool:
        below = [*(level.items for level in self._levels[1:]), []]
        are_held = (level.holds_the_same(held) for level, held in zip(self._levels, below, strict=True))
        return _are_the_same(items, self._levels[0].items) and all(are_held)

    def _walk_over(self, items: list[Any]) -> None:
        global _next
        is_long = len(items) > MAX_ITEMS
        self.first = _next
        walk = _Walk(0 if is_long else self.first)
        packed = pack_all(walk.items(items, 0))
        self.objects = walk.alive
        self.numbers = {id(value): self.first + number for number, value in enumerate(walk.alive)}
        _next += len(walk.alive)
        self.packed, self.digest = (b"", xxhash.xxh3_64_hexdigest(packed)) if is_long else (packed, "")


def _laid_out(container: Any, items: list[Any], node_apart: Callable[[Any, int], Any]) -> list[_Level]:
    """The levels; none if there is something among them that can change and is no list or dictionary.

    container   of the items; that it holds itself is left to a walk
    """
    levels = []
    seen: set[int] = set()
    items = list(items)
    while items:
        inner: dict[type, list[Any]] = {list: [], dict: []}
        for value in items:
            kind = value.__class__
            if kind in SETTLED:
                continue
            if kind in inner:
                if id(value) not in seen:
                    seen.add(id(value))
                    inner[kind].append(value)
            elif not is_settled(node_apart(value, 0)):
                return []
            if value is container:
                return []
        level = _Level(items, inner[list], inner[dict])
        levels.append(level)
        items = level.below()
    return levels


def rows_of(key: tuple[int, int], container: Any, items: list[Any], snapshot: Snapshot) -> Rows | None:
    """What is known of a container's items; None if they are to be walked over.

    key   (address of the container, 0 or, for the values of a dictionary, 1)
    """
    is_walked = isinstance(snapshot, _Walk) or (snapshot.is_apart and len(items) <= MAX_ITEMS)
    if is_walked or items[0].__class__ not in (list, dict):
        return None
    known = _kept[key] = _kept.get(key) or _before.get(key) or Rows(container)
    if not known.can_be_used(items, snapshot.node_apart):
        return None
    if not snapshot.numbers.keys().isdisjoint(known.numbers.keys()):
        return None  # something in them has been met, and has another number
    snapshot.numbers.update(known.numbers)
    return known


def objects_in(container: Any) -> list[Any]:
    """The lists and dictionaries in the items of a container for which `rows_of` has just been asked."""
    found = [_kept[key].objects for key in ((id(container), 0), (id(container), 1)) if key in _kept]
    return found[0] if found else []
