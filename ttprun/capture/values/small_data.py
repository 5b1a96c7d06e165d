"""Small tensors and arrays in large numbers, as a dataset in memory holds them: compared like one large array.

A list of samples would otherwise be walked over and written at each boundary, tensor by tensor. That each of them is as
it was is seen by its address, by its version counter if it has one, and by a hash of its elements; after some
boundaries at which all were the same they are looked at in turns, as in large.py. Begin with `may_follow`.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy
import torch
import xxhash

from ttprun.capture.records.nodes import DataNode
from ttprun.capture.values.large import SMALL_BYTES, TENSOR_BYTES, TURN_BYTES, WHOLE_BYTES, fingerprint_of_all
from ttprun.capture.values.large_data import form_of
from ttprun.capture.values.turns import ALL, NOTHING, Turns

_TURN = 64  # that are a part, at most
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


class SmallData:
    """Some tensors and arrays, which are kept alive, with their elements as they were when they were added.

    size_bytes   of all
    turns        of `hold`
    """

    __slots__ = (
        *("_begins", "_hashes", "_memories", "_places", "_values"),
        *("size_bytes", "turns"),
    )

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._memories: list[tuple[int, int, int]] = []  # (address, end, number) of small ones
        self._begins: list[int] = []  # of these, in order; [] until it is asked for
        self._places: list[tuple[int, Any]] = []
        self._hashes: list[bytes] = []
        self.size_bytes = 0
        self.turns = Turns()

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: Any, number: int) -> DataNode:
        """Follow one more that `may_follow` allows; returns a node for comparisons alone.

        number   of the value, in its walk
        """
        digest = _hash_of(value)
        self._values.append(value)
        self._places.append(_place_of(value))
        self._hashes.append(digest)
        self.size_bytes += value.nbytes
        at, end = _memory_of(value)
        if 0 < end - at <= SMALL_BYTES:
            self._memories.append((at, end, number))
            self._begins = []
        dtype, shape = form_of(value) or ("", [])
        return DataNode(dtype, shape, digest, 0)

    def owner_of(self, address: int) -> tuple[int, int] | None:
        """(number, bytes before the address) of one in whose memory an address lies, if that is small."""
        if not self._begins:
            self._memories = _without_inner(self._memories)
            self._begins = [begin for begin, *_ in self._memories]
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address >= self._memories[at][1]:
            return None
        begin, _, number = self._memories[at]
        return number, address - begin

    def hold(self, is_whole: bool) -> bool:
        """Whether all are as they were, as far as a boundary has time to look.

        is_whole   nothing is left to its turn
        """
        count, turn = len(self._values), max(1, min(_TURN, TURN_BYTES * len(self._values) // max(1, self.size_bytes)))
        due = ALL if is_whole else self.turns.due(-(-count // turn))
        begin, end = (0, count) if due == ALL else (due * turn, min(count, (due + 1) * turn))
        return self.turns.note(due, due == NOTHING or self._are_same(begin, end))

    def changed(self) -> list[Any]:
        """Those that are not as they were: each is looked at."""
        before = zip(self._values, self._places, self._hashes, strict=True)
        return [value for value, place, digest in before if _place_of(value) != place or _hash_of(value) != digest]

    def _are_same(self, begin: int, end: int) -> bool:
        values = self._values[begin:end]
        if list(map(_place_of, values)) != self._places[begin:end]:
            return False
        return list(map(_hash_of, values)) == self._hashes[begin:end]


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
