"""The items of long containers: packed once while they are unchanged, and later only what was added.

E.g. a vocabulary, a list of file names, the losses so far, rows of a JSON file: walking over them at each boundary
would take longer than a step. This is done for items that can never change, for lists and dictionaries whose changes
are tracked (changes.py), and for tensors that optimizers update, by their addresses. Lists and dictionaries among the
items may be referenced elsewhere too, such as a loop's current row: they have numbers of their own, the same at each
boundary. Begin with `kept_items`.

Small tensors and arrays in large numbers, as a dataset in memory holds them, are compared like one large array
(`SAMPLES`): each by its address, by its version counter if it has one, and by a hash of its elements.
"""

from __future__ import annotations

import ctypes
import enum
from bisect import bisect_right
from collections import deque
from pathlib import PurePath
from types import FunctionType
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor

from ttprun.capture.records.nodes import DataNode, Node, Number, RefusedNode, TensorNode, WeightNode
from ttprun.capture.records.packing import SETTLED, pack
from ttprun.capture.values.changes import ALL, NOTHING, Kind, Piece, Remembered, Tracker, Turns, begins_with
from ttprun.capture.values.kept import Trace, lasting_numbers
from ttprun.capture.values.large import SMALL_BYTES, TENSOR_BYTES, TURN_BYTES, WHOLE_BYTES, fingerprint_of_all, form_of
from ttprun.capture.values.objects import record_object, record_value_object
from ttprun.capture.values.snapshot import HANDLERS, Snapshot
from ttprun.introspect.model_tensors import is_distributed, local_of
from ttprun.introspect.ownership import is_script_code
from ttprun.introspect.safe_reads import is_a

_PLAIN_KINDS = "biufc"  # of dtypes whose elements are read as a buffer
_version_of: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]


def may_follow(value: Any) -> bool:
    """Whether each change of a tensor or array can be seen, and nothing but its elements counts."""
    if type(value) is numpy.ndarray:
        return not value.dtype.hasobject
    if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.is_cpu:
        return False
    return not (value.requires_grad or value.is_quantized or value.is_inference() or value.is_meta)


def is_alone(value: Any) -> bool:
    """Whether a tensor that `may_follow` allows is all of its memory, which torch has given it."""
    if type(value) is not torch.Tensor or not value.is_contiguous():
        return False
    storage = value.untyped_storage()
    return 0 < storage.nbytes() == value.nbytes and storage.resizable()


def _hash_of(value: Any) -> bytes:
    """Of the elements; without a detour for the common forms, as this is done for many at each boundary."""
    size = value.nbytes
    if type(value) is torch.Tensor:
        if 0 < size <= TENSOR_BYTES and value.is_contiguous() and not (value.is_conj() or value.is_neg()):
            return xxhash.xxh3_64_digest((ctypes.c_char * size).from_address(value.data_ptr()))
    elif size <= WHOLE_BYTES and value.flags.c_contiguous and value.dtype.kind in _PLAIN_KINDS:
        return xxhash.xxh3_64_digest(value)
    return fingerprint_of_all(value)


def _memory_of(value: Any) -> tuple[int, int]:
    """Begin and end of the memory that a tensor or array uses; of a tensor, of all its storage."""
    if type(value) is torch.Tensor:
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    at = value.__array_interface__["data"][0]
    reach = [(length - 1) * by for length, by in zip(value.shape, value.strides, strict=True)] if value.size else [0]
    return at + sum(min(0, span) for span in reach), at + sum(max(0, span) for span in reach) + value.itemsize


def _without_inner(memories: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Ranges in order, without those inside another one: so the last that begins before an address reaches furthest."""
    outer: list[tuple[int, int, int]] = []
    for memory in sorted(memories, key=lambda memory: (memory[0], -memory[1], memory[2])):
        if not outer or memory[1] > outer[-1][1]:
            outer.append(memory)
    return outer


def _place_of(value: Any) -> tuple[int, Any]:
    """Where it is, and what else is seen at once: version and flag of a tensor, the shape of an array."""
    if type(value) is torch.Tensor:
        return value.data_ptr(), (_version_of(value), value.requires_grad)
    return value.__array_interface__["data"][0], value.shape


def _are_samples_same(things: list[Any], hashes: list[Any], places: list[Any]) -> bool:
    return list(map(_place_of, things)) == places and list(map(_hash_of, things)) == hashes


SAMPLES = Kind(_are_samples_same, 64, _hash_of, _place_of, lambda sample, _: int(sample.nbytes), TURN_BYTES)


class DataPiece(Piece):
    """A piece that may have small tensors and arrays in it.

    samples   those that are followed
    """

    __slots__ = ("_begins", "_memories", "samples")

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Any] = []
        self._memories: list[tuple[int, int, int]] = []  # (address, end, number) of small samples
        self._begins: list[int] = []  # of these, in order

    def owner_of(self, address: int) -> tuple[int, int] | None:
        """(number, bytes before the address) of a sample in whose memory an address lies, if that is small."""
        if not self._begins:
            memories = [(*_memory_of(sample), self.numbers[id(sample)]) for sample in self.samples]
            self._memories = _without_inner([memory for memory in memories if 0 < memory[1] - memory[0] <= SMALL_BYTES])
            self._begins = [begin for begin, *_ in self._memories]
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address >= self._memories[at][1]:
            return None
        begin, _, number = self._memories[at]
        return number, address - begin

    def follow_samples(self, samples: Tracker) -> None:
        """Follow what a walk has met; it may meet more later."""
        if samples.things:
            self.trackers[SAMPLES], self.samples = samples, samples.things
            self._begins = []

    def shares_memory(self, snapshot: Snapshot) -> bool:
        """Whether a walk has met the memory of a sample."""
        return any(self.owner_of(address) is not None for address in snapshot.storages)


MIN_ITEMS = 12  # for fewer items packing again is as fast
MAX_ITEMS = 100_000  # of more items only a digest is recorded, and compared
MANY_ROWS = 512  # objects in a container, above which they are not added to those that a walk has met
WALKS = 16  # boundaries for which a container that has changed, or cannot be kept, is walked over before another try
_MOST = {True: 1 << 16, False: 1 << 13}  # items that are compared at each boundary, of a list and of anything else
_EACH = 64  # turns between two whole looks at what has no places
_OF_OBJECTS = (record_object, record_value_object)
_MAY_BE_KEPT = (bytes, tuple, list, dict, Tensor, numpy.ndarray, PurePath, enum.Enum, FunctionType)


class Walk(Snapshot):
    """A walk that assigns numbers of its own.

    is_relative   they begin at 0: equal items in two processes have equal nodes
    samples       the tensors and arrays met that are followed
    """

    has_limit = False

    def __init__(self, is_relative: bool) -> None:
        super().__init__({}, is_separate=True)
        self.is_relative = is_relative
        self.samples = Tracker(SAMPLES)

    def node(self, value: Any, depth: int) -> Any:
        if type(value) is Tensor and not value.is_cpu:
            self.trace.open += 1
            return RefusedNode("is on a device")  # a copy to the CPU would wait for it, and nothing would be kept
        if id(value) in self.numbers or not may_follow(value):
            return super().node(value, depth)
        if self.is_relative:
            self.samples.add([value])
            self.number(value)
            dtype, shape = form_of(value) or ("", [])
            return DataNode(dtype, shape, self.samples.seen[-1], 0)
        is_whole, n_open = is_alone(value), self.trace.open
        node = super().node(value, depth)
        if is_whole and type(node) is TensorNode:
            self.trace.open = n_open
            self.samples.add([value])
        return node

    def number(self, value: Any) -> Number:
        number = len(self.alive) if self.is_relative else lasting_numbers(1)
        self.numbers[id(value)] = number
        self.alive.append(value)
        return Number(number)


class KeptItems(DataPiece):
    """What is remembered of the items of one container.

    packed    their nodes, one after the other
    first     in a container of more than MAX_ITEMS, the lowest number of the lists and dictionaries in them
    objects   these lists and dictionaries, in the order of their numbers
    trace     what the nodes depend on, besides the items themselves
    age       how many boundaries ago each of the items, and what is in them, was looked at, at most
    """

    __slots__ = (
        *("_digest", "_digest_of", "_failures", "_items", "_memory", "_order", "_stepped", "_walk", "_walks_left"),
        *("_whole", "age", "first", "objects", "packed", "trace"),
    )

    def __init__(self) -> None:
        self._walks_left = self._failures = 0
        self._forget()

    def _forget(self) -> None:
        super().__init__()
        self._items: list[Any] = []
        self._memory: list[int] = []  # where each item lies, if they are what optimizers update
        self._stepped: Any = None
        self._walk: Walk | None = None
        self._whole: Piece | None = None
        self.trace = Trace()
        self._digest, self._digest_of = "", -1
        self._order = Turns()  # of the items themselves
        self.packed = bytearray()
        self.objects: list[Any] = []
        self.first = self.age = 0

    @property
    def digest(self) -> str:
        """Of `packed`, to which things are only ever added."""
        if self._digest_of != len(self.packed):
            self._digest, self._digest_of = xxhash.xxh3_64_hexdigest(self.packed), len(self.packed)
        return self._digest

    def take_up(self, container: Any, items: list[Any], snapshot: Snapshot) -> bool:
        """Know the nodes of these items.

        container   whose items they are, or whose keys or values
        items       all of them now, at least MIN_ITEMS
        snapshot    the walk that has met the container
        returns     False if they cannot be kept, or change too often for it to be worth it
        """
        if self._walks_left and len(items) <= MAX_ITEMS:
            self._walks_left -= 1
            return False
        had_rows = bool(self.objects)
        is_as_it_was = self._is_as_it_was(items, snapshot)
        if not is_as_it_was:
            self._forget()
        if is_as_it_was or not had_rows or len(items) > MAX_ITEMS:
            if len(self._items) == len(items) or self._add(container, items, snapshot):
                if self._whole is None and type(container) is dict:
                    self._whole = Piece((container,))
                return True
            self._forget()
        self._walks_left = WALKS << min(self._failures, 6)
        self._failures += 1
        return False

    def _is_as_it_was(self, items: Any, snapshot: Snapshot) -> bool:
        """Whether what is known of the first items is so now."""
        count = len(self._items)
        if len(items) != count and (self._memory or (self.objects and len(items) > MAX_ITEMS)):
            return False
        if self.trackers and not self.holds_in_turn(snapshot.is_separate):
            return False
        if self._memory and not self._is_in_place(items, snapshot):
            return False
        if self._whole is not None and len(items) == count and self._whole.holds():
            self._order.note(ALL, True)
        else:
            self._whole = None
            is_in_turns = len(items) == count > _MOST[type(items) is list] and not snapshot.is_separate
            if not self._begins_with_known(items, is_in_turns):
                return False
        self.age = 0 if snapshot.is_separate else max(self.turns.age, self._order.age)
        return True

    def _begins_with_known(self, items: Any, is_in_turns: bool) -> bool:
        """Whether the items begin with those that are known, as far as a boundary has time to look.

        is_in_turns   they may be very many
        """
        most = _MOST[True]
        a_round = -(-len(items) // most) if type(items) is list else _EACH
        due = self._order.due(a_round) if is_in_turns else ALL
        if due == ALL or (due == 0 and type(items) is not list):
            return self._order.note(due, begins_with(items, self._items))
        if type(items) is list:
            is_same = due == NOTHING or begins_with(items, self._items, due * most, most)
        else:  # its ends
            is_same = next(iter(items)) is self._items[0] and (type(items) is not deque or items[-1] is self._items[-1])
        return self._order.note(due, is_same)

    def _is_in_place(self, items: list[Any], snapshot: Snapshot) -> bool:
        try:
            return self._stepped is snapshot.stepped and _pointers([*items]) == self._memory
        except (TypeError, AttributeError):  # something else than a tensor among them
            return False

    def _add(self, container: Any, items: list[Any], snapshot: Snapshot) -> bool:
        """Add the items after those that are known."""
        added = [*items][len(self._items) :]
        nodes: list[Any] | None = added
        if not set(map(type, added)) <= SETTLED:
            first = next(iter(items))
            if type(first) is Tensor and not first.is_cpu:  # its node would be a copy of its own to the CPU
                return False
            nodes = self._weights(added, snapshot) if issubclass(type(first), Tensor) and not self.samples else None
            if nodes is not None:
                self._memory, self._stepped = _pointers([*items]), snapshot.stepped
            else:
                nodes = self._rows(container, added, len(items) > MAX_ITEMS)
        if nodes is None:
            return False
        self.packed += pack_all(nodes)
        self._items += added
        return True

    @staticmethod
    def _weights(added: list[Any], snapshot: Snapshot) -> list[Any] | None:
        """Nodes of what optimizers update; None if something else is among them."""
        nodes = []
        for item in added:
            node = snapshot.separate_node(item, 1) if not is_a(item, Tensor) or item.is_cpu else None
            if not isinstance(node, WeightNode):
                return None
            nodes.append(node)
        return nodes

    def _rows(self, container: Any, added: list[Any], is_long: bool) -> list[Any] | None:
        walk = self._walk = self._walk or Walk(is_long)
        begin = len(walk.alive)
        if any(type(item) is FunctionType and is_script_code(item.__code__.co_filename) for item in added):
            return None  # one of the script's own may be given attributes
        self.trace = walk.trace
        marks = walk.trace.marks()
        nodes = walk.items(added, 0)
        if id(container) in walk.numbers or walk.trace.open:
            return None
        new = walk.alive[begin:]
        self.follow(walk.trace.since(marks))
        self.follow_samples(walk.samples)
        self.objects += new
        if is_long:
            self.first = lasting_numbers(len(new))
        numbered = ((id(value), walk.numbers[id(value)]) for value in new)
        self.numbers.update((key, self.first + number) for key, number in numbered if number is not None)
        return nodes


def _pointers(tensors: list[Any]) -> list[int]:
    """Where each lies. Raises TypeError or AttributeError if one is no tensor."""
    if is_distributed(tensors[0]):
        return [local_of(tensor).data_ptr() for tensor in tensors]
    return list(map(Tensor.data_ptr, tensors))


def pack_all(nodes: list[Node]) -> bytes:
    """Nodes one after the other: a packed list without its head of 1, 3 or 5 bytes."""
    packed = pack(nodes)
    return packed[1 if len(nodes) < 16 else 3 if len(nodes) < 1 << 16 else 5 :]


_kept: Remembered[KeptItems] = Remembered()


def kept_items(snapshot: Snapshot, container: Any, items: list[Any], which: int = 0) -> KeptItems | None:
    """What is known of a container's items, with the nodes of all of them; None if they are to be walked over.

    items   a list, or a view of a dictionary
    which   0, and 1 for the values of a dictionary
    """
    first = type(next(iter(items)))
    if isinstance(snapshot, Walk) or not (
        first in SETTLED or issubclass(first, _MAY_BE_KEPT) or HANDLERS[first] in _OF_OBJECTS
    ):
        return None
    is_compared = snapshot.is_separate and len(items) <= MAX_ITEMS  # with another process, which gives other numbers
    if is_compared and first in (list, dict):
        return None
    kept = _kept.get((id(container), which))
    if kept is None:
        kept = KeptItems()
        _kept.keep((id(container), which), kept)
    if not kept.take_up(container, items, snapshot):
        return None
    if kept.numbers:
        if is_compared or not kept.is_apart(snapshot):
            return None  # something in them has been met, and has another number
        if kept.samples:
            if kept.shares_memory(snapshot):
                return None
            snapshot.data.append(kept)
        if len(kept.numbers) > MANY_ROWS:
            snapshot.rows.append(kept.numbers)
        else:
            snapshot.numbers.update(kept.numbers)
    return kept


def objects_in(container: Any) -> list[Any]:
    """The lists and dictionaries in the items of a container for which `kept_items` has just been asked."""
    entries = (_kept.get((id(container), which)) for which in (0, 1))
    return next((kept.objects for kept in entries if kept is not None and kept.objects), [])
