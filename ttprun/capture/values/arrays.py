"""numpy arrays: small ones are recorded, large ones compared (see large.py).

What is a view of a small array, of a tensor or of bytes is
recorded with that, so that it is a view again; its place there is [strides, offset]. Of other memory that it is a part
of (a large array that does not change, a file in memory) only this part is recorded, and the place, [strides, offset,
size of the whole, whether others are sure to hold it]: the replacement's array that lies likewise stays. `base` and
`place` are None for an array with memory of its own.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy
import torch

from ttprun.capture.records.nodes import ArrayNode, ObjectArrayNode, ReferenceNode, RefusedNode, SameNode
from ttprun.capture.records.packing import MISSING, name_of
from ttprun.capture.values.large import SMALL_BYTES, address_of, follow, is_followed, record_data
from ttprun.capture.values.plain import dtype_of, dtype_text
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import Snapshot
from ttprun.introspect.safe_reads import dictionary_of, is_a


def record_array(snapshot: Snapshot, value: numpy.ndarray[Any, Any], depth: int) -> Any:
    """An array of numpy's own type, or a memory map: a small one with its bytes, a large one as data.

    value   any dtype, shape and strides; of objects only if dtype is object itself
    """
    if value.dtype.hasobject:
        if value.dtype != object:
            return RefusedNode("is an array of records with objects in them")
        number = snapshot.number(value)
        return ObjectArrayNode(number, list(value.shape), snapshot.items(value.reshape(-1).tolist(), depth))
    text, shape = dtype_text(value.dtype), list(value.shape)
    if value.nbytes > SMALL_BYTES:
        return record_data(snapshot, value, *_followed(snapshot, value))
    number = snapshot.number(value)
    base = _memory_of(value)
    if base is not None and _is_recorded_with_it(snapshot, base):
        place = [list(value.strides), _offset(value, base)]
        return ArrayNode(number, text, shape, b"", "C", snapshot.node(base, depth + 1), place)
    at = _address(value)
    if base is None and at in snapshot.storages:  # of a tensor that was made of the array
        base_node = ReferenceNode(snapshot.storages[at])
        return ArrayNode(number, text, shape, b"", "C", base_node, [list(value.strides), 0])
    if base is None:
        snapshot.memories.append((at, at + value.nbytes, number))
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return ArrayNode(number, text, shape, value.tobytes(order), order, None, _place(value, base))  # type: ignore[arg-type]


def _memory_of(value: numpy.ndarray[Any, Any]) -> Any:
    """What holds the memory that an array lies in; None if it does so itself."""
    base: Any = value.base
    return base.obj if isinstance(base, memoryview) else base


def is_changing(snapshot: Snapshot, value: numpy.ndarray[Any, Any]) -> bool:
    """Whether a large array is one that the script is known to change.

    value   any dtype and shape
    """
    return is_followed(value) and _followed(snapshot, value)[1]


def _followed(snapshot: Snapshot, value: numpy.ndarray[Any, Any]) -> tuple[bytes, bool]:
    entry = snapshot.arrays.get(id(value))
    if entry is None:
        entry = snapshot.arrays[id(value)] = follow(value)
    return entry


def _is_recorded_with_it(snapshot: Snapshot, base: Any) -> bool:
    """Whether what an array is a view of has a node from which both can be made again."""
    if type(base) in (numpy.ndarray, numpy.memmap):
        return not base.dtype.hasobject and (base.nbytes <= SMALL_BYTES or is_changing(snapshot, base))
    return isinstance(base, torch.Tensor)


def _address(memory: Any) -> int:
    """The address of an array, a tensor or a buffer. Raises TypeError or ValueError if it has none."""
    return address_of(memory if isinstance(memory, torch.Tensor | numpy.ndarray) else numpy.frombuffer(memory, "u1"))


def _offset(value: numpy.ndarray[Any, Any], base: Any) -> int:
    return _address(value) - _address(base)


def _place(value: numpy.ndarray[Any, Any], base: Any) -> list[Any] | None:
    """The place of an array in memory that is not recorded with it."""
    if base is None:
        return None
    try:
        size = base.nbytes if isinstance(base, numpy.ndarray) else memoryview(base).nbytes
        offset = _offset(value, base)
    except (TypeError, ValueError, BufferError):  # it has no address
        size, offset = 0, 0
    is_held = value.flags.writeable and isinstance(base, mmap.mmap | ctypes.Array)
    return [list(value.strides), offset, size, is_held]


def record_other_array(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Matrices, masked and record arrays: compared, by dtype, shape and digest.

    value   of a subclass of numpy.ndarray, any dtype but objects
    """
    plain = numpy.ndarray.view(value, numpy.ndarray)
    if plain.dtype.hasobject:
        return RefusedNode(f"is a {type(value).__name__} of objects")
    mask = (dictionary_of(value) or {}).get("_mask") if is_a(value, numpy.ma.MaskedArray) else None
    parts = [plain] if mask is None else [plain, numpy.broadcast_to(mask, plain.shape)]
    digests = [follow(part)[0].hex() for part in parts]
    return SameNode(name_of(type(value)), f"{dtype_text(plain.dtype)} {list(plain.shape)} {' '.join(digests)}")


def restore_array(restore: Restore, live: Any, node: ArrayNode, name: str) -> Any:
    """In place if the live array is alike, else a new one.

    live   anything; written if its dtype, shape and place in memory are the recorded ones
    """
    number, shape, raw, place = node.number, node.shape, node.content, node.place
    order: Any = node.order
    dtype = dtype_of(node.dtype)
    is_map = type(live) is numpy.memmap and live.flags.writeable  # what is written into it stands in a file
    is_alike = (is_map or type(live) is numpy.ndarray) and live.dtype == dtype and list(live.shape) == shape
    old = _memory_of(live) if is_alike else None
    if node.base is not None:
        base = restore.value(MISSING if old is None else old, node.base, f"{name}.base")
        if base is MISSING:
            return restore.refuse(live, f"{name} is a view of an array that could not be restored")
        is_there = is_alike and [list(live.strides), _offset(live, base)] == place
        if is_there and restore.claim(number, live):
            return live
        try:
            memory = base.detach().numpy() if isinstance(base, torch.Tensor) else base
            made: Any = numpy.ndarray(shape, dtype, memory, place[1], place[0])  # type: ignore[index]
        except (TypeError, ValueError, RuntimeError) as error:
            return restore.refuse(live, f"{name} is a view of what cannot be looked at so: {error}")
        restore.claim(number, made)
        return made
    whole = numpy.frombuffer(raw, dtype=dtype).reshape(shape, order=order).copy(order)
    if is_alike and _place(live, old) == place and restore.claim(number, live):
        if live.tobytes(order) == raw:
            return live
        # Of a large array that does not change it is the same part of another one.
        if live.flags.writeable and not isinstance(old, numpy.ndarray):
            live[...] = whole
            return live
    if place is not None and place[3]:
        return restore.refuse(live, f"{name} is a part of memory that others hold too, and lies elsewhere here")
    restore.claim(number, whole)
    return whole


def restore_object_array(restore: Restore, live: Any, node: ObjectArrayNode, name: str) -> Any:
    """An array of dtype object, item by item."""
    number, shape = node.number, node.shape
    is_alike = type(live) is numpy.ndarray and live.dtype == object and list(live.shape) == shape
    items = restore.items(live.reshape(-1).tolist() if is_alike else [], node.items, name)
    target: Any = live if is_alike and restore.claim(number, live) else numpy.empty(shape, dtype=object)
    restore.claim(number, target)
    if len(items) == target.size:
        target.reshape(-1)[:] = items
    return target
