"""Data: what the set-up has put into a list or dictionary, with all that is in it, compared as one thing.

A dataset in memory is a tree of very many containers, objects, small tensors and arrays: columns, splits, an index
beside the rows. As long as nothing in it has changed since the first boundary only a digest of it is recorded, since
the replay has made it again, as it has a large array; and it is looked at in turns (changes.py). What a step changes is
walked over from then on; what is left of the tree in one piece goes on as data. Begin with `node_of`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy
import xxhash
from torch import Tensor

from ttprun.capture.records.nodes import DataTreeNode, Number, ReferenceNode
from ttprun.capture.records.packing import MISSING, SETTLED, name_of, pack
from ttprun.capture.values.changes import Clock, Remembered
from ttprun.capture.values.kept import attributes_of_containers, lasting_numbers
from ttprun.capture.values.large import SMALL_BYTES, note_restored
from ttprun.capture.values.long_items import DataPiece, Walk, may_follow
from ttprun.capture.values.objects import form_of_class, record_object, record_value_object
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import HANDLERS, Snapshot
from ttprun.capture.values.trees import PLACE, whole_of
from ttprun.introspect.safe_reads import attributes_of, is_a, length_of

MANY = 2048  # things (see `_weighs_much`), for fewer of which walking over them is as fast
SMALL_TREE_BYTES = 1 << 20  # of packed nodes of all trees, up to which they are recorded beside the digest
DATA_BYTES = 4 << 20  # the same of what holds a few small tensors or arrays, which are recorded by others
MOST_TREES = 32  # each costs some time at each boundary
_MOST_OUTSIDE = 256
_MANY_ROWS = 4096  # from which on they are looked at together, if they are plain
_LARGE_BYTES = 4 << 20  # of one tensor or array, above which large.py is to hash its parts in turns
_WEIGHT_OF_TENSOR = 8  # and for each so many bytes of it, one more
_BYTES = 16 << 10
_ITEMS_OF_WEIGHT = 16  # numbers in a list, and hundreds of letters in a text, that weigh as much as a list
_LETTERS = 256
_CONTAINERS = (dict, list, tuple, set, frozenset)
_OF_OBJECTS = (record_object, record_value_object)
_MET_WITHIN = 8  # boundaries


class _Walk(Walk):
    """A walk over a tree, with numbers of its own, that gives up where it meets something that is not data.

    met          (number of what has a number already or of the tree around it, place in that); None of what is new
    ids_before   all that have one, by their ids
    updated      addresses of the storages that optimizers update
    outside      the numbers that `met` has given, each with its place among them
    is_exact     its nodes say all
    """

    def __init__(
        self,
        met: Callable[[Any], tuple[int, int] | None],
        ids_before: list[Mapping[int, Any]],
        updated: Container[int] = (),
    ) -> None:
        super().__init__(is_relative=True)
        self.outside: dict[int, int] = {}
        self.is_exact = True
        self._met, self._ids_before, self._updated = met, ids_before, updated

    def node(self, value: Any, depth: int) -> Any:
        if self.trace.open:
            return None
        if type(value) in SETTLED or id(value) in self.numbers:
            return super().node(value, depth)
        met = self._met(value)
        if (is_a(value, Tensor) or is_a(value, numpy.ndarray)) and not (met is None and self._may_be_sample(value)):
            self.trace.open += 1  # what was met before may share its memory with others
            return None
        if met is not None:
            place = self.outside.setdefault(met[0], len(self.outside))
            return ReferenceNode(~(place * PLACE + met[1]))
        return super().node(value, depth)

    def _may_be_sample(self, value: Any) -> bool:
        if not may_follow(value) or value.nbytes > _LARGE_BYTES:
            return False
        return type(value) is not Tensor or value.untyped_storage().data_ptr() not in self._updated

    def items(self, values: Any, depth: int) -> list[Any]:
        kinds = set(map(type, values))
        if len(kinds) == 1 and len(values) >= _MANY_ROWS and not self.trace.open:
            packed = self._take_up_rows(kinds.pop(), values)
            if packed is not None:
                self.is_exact = False
                return [packed]
        return super().items(values, depth)

    def _take_up_rows(self, kind: type, items: list[Any]) -> bytes | None:
        """Meet very many rows at once; None if each is to be met by itself."""
        keys = list(map(id, items)) if kind is not tuple else []
        if len({*keys}) < len(keys) or any(
            not ids.keys().isdisjoint(keys) for ids in (self.numbers, *self._ids_before)
        ):
            return None
        rows = _Rows(kind, items)
        packed = rows.packed()
        if packed is None or kind is tuple:
            return packed
        self.numbers.update(zip(keys, range(len(self.alive), len(self.alive) + len(keys)), strict=True))
        self.alive += items
        if rows.dictionaries:
            self.trace.objects += zip(items, rows.dictionaries, strict=True)
        else:
            self.trace.contents += items
        return packed


class _Rows:
    """Very many items of one kind that hold nothing but numbers and text: they are looked at together."""

    def __init__(self, kind: type, items: list[Any]) -> None:
        self._kind, self._items = kind, items
        self._is_of_objects = HANDLERS[kind] is record_object
        self.dictionaries: list[dict[str, Any]] = []

    def packed(self) -> bytes | None:
        """What is in them; None if there is something else."""
        if self._kind in (tuple, list):
            return pack(self._items) if _are_settled(chain.from_iterable(self._items)) else None
        if self._kind is dict:
            return self._packed(self._items)
        if self._is_of_objects:
            name, getter, has_end, without = form_of_class(self._kind)
            if getter is None or has_end:
                return None
            self.dictionaries = list(map(getter, self._items))
            if without and not without.isdisjoint(chain.from_iterable(self.dictionaries)):
                return None
            inner = self._packed(self.dictionaries)
            return None if inner is None else pack([name, inner])
        return None

    @staticmethod
    def _packed(dictionaries: list[Any]) -> bytes | None:
        if set(map(type, chain.from_iterable(dictionaries))) != {str}:
            return None
        are_plain = _are_settled(chain.from_iterable(map(dict.values, dictionaries)))
        return pack(dictionaries) if are_plain else None


def _are_settled(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= SETTLED


class _Left:
    """What is left of trees that have just changed.

    boundary   of that
    ids        of the objects in them that are as they were
    trees      which keep these alive
    """

    def __init__(self) -> None:
        self.boundary = -1
        self.ids: set[int] = set()
        self.trees: list[DataTree] = []

    def add(self, tree: DataTree) -> None:
        """A tree has changed."""
        if self.boundary != Clock.boundary:
            self.clear()
        self.boundary = Clock.boundary
        self.trees.append(tree)
        self.ids |= tree.split()

    def clear(self) -> None:
        """Nothing is left."""
        self.ids, self.trees = set(), []

    def holds(self, value: Any) -> bool:
        """Whether an object is in it."""
        return self.boundary == Clock.boundary and id(value) in self.ids


class DataTree(DataPiece):
    """A list or dictionary that has never changed, and all that is in it.

    root      the container
    length    of it
    packed    its node, whose numbers begin at 0; empty of a large one, and of one with tensors or arrays
    first     its number; the others follow
    outside   (id, number) of each object that is referred to and is not in the tree
    """

    def __init__(self, root: Any, walk: _Walk, packed: bytes, outside: list[tuple[int, int]]) -> None:
        super().__init__()
        self.root, self.length, self.outside = root, length_of(root), outside
        self.digest = xxhash.xxh3_64_hexdigest(packed)
        others = sum(len(tree.packed) for tree in _trees.now.values())
        is_exact = walk.is_exact and not walk.samples.things and others + len(packed) <= SMALL_TREE_BYTES
        self.packed: bytes = packed if is_exact else b""
        self.first = lasting_numbers(len(walk.alive))
        self._alive = walk.alive
        self.numbers = {id(value): number for number, value in enumerate(walk.alive, self.first)}
        walk.trace.objects += attributes_of_containers(walk.trace.contents)
        self.follow(walk.trace)
        self.follow_samples(walk.samples)

    def node(self, snapshot: Snapshot) -> DataTreeNode | None:
        """Its node, after it has entered the walk; None if this walk has met a part of it before."""
        numbers = snapshot.numbers
        if any(numbers.get(key) != number for key, number in self.outside):
            return None
        if not self.is_apart(snapshot) or (self.samples and self.shares_memory(snapshot)):
            return None
        numbers[id(self.root)] = self.first
        snapshot.alive.append(self.root)
        snapshot.rows.append(self.numbers)
        snapshot.trace.open += 1  # what is in it is looked at here
        if self.samples:
            snapshot.data.append(self)
        outside = [ReferenceNode(number) for _, number in self.outside]
        kind, count, age = name_of(type(self.root)), len(self.numbers), self.turns.age
        return DataTreeNode(Number(self.first), kind, self.length, self.digest, count, outside, self.packed, age)

    def split(self) -> set[int]:
        """Ids of the objects in it that are as they were. What has changed is data no more, large arrays too."""
        changed = self.changed()
        for value in self.samples:
            if id(value) in changed and value.nbytes > SMALL_BYTES:
                note_restored(value)
        return self.numbers.keys() - changed


_trees: Remembered[DataTree] = Remembered()  # by the id of the root
_changed: dict[int, Any] = {}  # by id: containers that were restored item by item
_changed_at = 0  # the newest boundary of that
_left = _Left()


def node_of(snapshot: Snapshot, value: Any) -> DataTreeNode | None:
    """The node of a list or dictionary that is data; None of one that is to be walked over."""
    if snapshot.is_separate:
        return None
    tree = _trees.get(id(value)) if _trees.before or _trees.now else None
    if tree is None:
        is_left = bool(_left.trees) and _left.holds(value)
        if not (is_left or Clock.records <= 1):
            return None
        tree = _made(snapshot, value, is_left)
        if tree is None:
            return None
        _trees.keep(id(value), tree)
    elif length_of(value) != tree.length or not tree.holds_in_turn():
        _left.add(tree)
        for trees in (_trees.now, _trees.before):
            trees.pop(id(value), None)
        return None
    return tree.node(snapshot)


def begin_boundary() -> None:
    """Keep nothing alive longer than it counts."""
    if _left.trees and Clock.boundary != _left.boundary:
        _left.clear()
    if _changed and Clock.boundary > _changed_at + _MET_WITHIN:
        _changed.clear()


def holds_trees(items: Any) -> bool:
    """Whether there is data among some items, or the rest of what was data until now."""
    if len(items) > MOST_TREES or not (_trees.before or _trees.now or _left.trees):
        return False
    return any(id(item) in _trees.before or id(item) in _trees.now or _left.holds(item) for item in items)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector would look at the many new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collection()
def _made(snapshot: Snapshot, value: Any, is_left: bool) -> DataTree | None:
    """A container as data; None if it is none.

    is_left   it is left of a tree: what was not in that is no data
    """
    try:
        if len(_trees.now) >= MOST_TREES or not _weighs_much(value):
            return None
    except RuntimeError:  # another thread is changing it
        return None
    walk = _Walk(lambda inner: _met_in(snapshot, inner), [snapshot.numbers, *snapshot.rows], snapshot.stepped)
    node = walk.node(value, 0)
    if walk.trace.open or len(walk.outside) > _MOST_OUTSIDE:
        return None
    if is_left and not all(map(_left.holds, walk.alive)):
        return None
    if _changed and any(id(inner) in _changed for inner in walk.alive):
        return None
    packed = pack(node)
    samples = walk.samples.things
    if samples and sum(sample.nbytes for sample in samples) <= SMALL_BYTES and len(packed) <= DATA_BYTES:
        return None  # their elements are recorded, too
    ids = {number: key for key, number in snapshot.numbers.items()}
    outside = [(ids[number], number) for number in walk.outside if number in ids]
    if len(outside) < len(walk.outside):
        return None
    return DataTree(value, walk, packed, outside)


def _met_in(snapshot: Snapshot, value: Any) -> tuple[int, int] | None:
    """(number, 0) of an object that a walk has met, or (number of its tree, place in it); None of a new one."""
    key = id(value)
    number = snapshot.numbers.get(key)
    if number is not None:
        return number, 0
    for numbers in snapshot.rows:
        if key in numbers:
            first = next(iter(numbers.values()))
            return first, numbers[key] - first
    return None


def _weighs_much(value: Any) -> bool:
    """Whether a container holds so much that it is worth being one thing."""
    weight, waiting, seen = 0, [value], set()
    while waiting:
        inner = waiting.pop()
        kind = type(inner)
        if kind in (str, bytes):
            weight += len(inner) // (_LETTERS * _ITEMS_OF_WEIGHT)
            continue
        if kind in SETTLED or id(inner) in seen:
            continue
        seen.add(id(inner))
        weight += 1
        if is_a(inner, Tensor) or is_a(inner, numpy.ndarray):
            weight += _WEIGHT_OF_TENSOR + (inner.nbytes // _BYTES if may_follow(inner) else 0)
        elif issubclass(kind, _CONTAINERS):
            weight += length_of(inner) // _ITEMS_OF_WEIGHT
            if weight <= MANY:
                base: Any = next(base for base in _CONTAINERS if issubclass(kind, base))
                waiting += dict.values(inner) if base is dict else base.__iter__(inner)
        elif HANDLERS[kind] in _OF_OBJECTS:
            waiting += attributes_of(inner).values()
        if weight > MANY:
            return True
    return False


def restore_data_tree(restore: Restore, live: Any, node: DataTreeNode, name: str) -> Any:
    """Compare with what the replay has made; if that is other data, it is written over if all of it was recorded."""
    if node.age:
        restore.note_age(name, node.age)
    is_alike = live is not MISSING and name_of(type(live)) == node.kind
    if node.packed and not (is_alike and restore.claim(node.number, live)):
        return restore.value(live, whole_of(node), name)
    if not is_alike:
        return restore.refuse(live, unlike(name, node.kind, live))
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    starts = {reference.number for reference in node.outside if isinstance(reference, ReferenceNode)}

    def met(value: Any) -> tuple[int, int] | None:
        number = None if value is live else restore.claims.get(id(value))
        if number is None:
            return None
        first = restore.tree_around(number)
        return (first, number - first) if first in starts else (number, 0)

    walk = _Walk(met, [restore.claims])
    packed = pack(walk.node(live, 0))
    is_same = (
        not walk.trace.open
        and xxhash.xxh3_64_hexdigest(packed) == node.digest
        and [*walk.outside] == [reference.number for reference in node.outside if isinstance(reference, ReferenceNode)]
    )
    if is_same:
        restore.claim_tree(node.number, walk.alive)
    elif node.packed:
        return restore.value(live, whole_of(node), name)
    restore.is_same(is_same, name, "is data that differs from the lost rank's")
    return live


def note_changed(container: Any) -> None:
    """A container was restored item by item: it is no data that a replay would make again."""
    global _changed_at
    _changed_at = Clock.boundary
    _changed[id(container)] = container


def forget() -> None:
    """The run of the script is over."""
    _changed.clear()
    _left.clear()
