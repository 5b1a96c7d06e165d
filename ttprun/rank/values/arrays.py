"""numpy arrays: small ones are recorded, large ones compared (see large.py).

[tag, number, dtype, shape, bytes, order, base, strides, offset]: a view of a small array is recorded with its base, so
that it is a view again; `base` is None for an array with memory of its own.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from ttprun.rank.values.large import SMALL_BYTES, follow_array
from ttprun.rank.values.nodes import MISSING, Tag, name_of
from ttprun.rank.values.plain import dtype_of, dtype_text
from ttprun.rank.values.restore import Restore, told
from ttprun.rank.values.snapshot import Snapshot


def record_array(snapshot: Snapshot, value: numpy.ndarray[Any, Any], depth: int) -> Any:
    """An array of numpy's own type, or a memory map."""
    if value.dtype.hasobject:
        if value.dtype != object:
            return [Tag.REFUSED, "is an array of records with objects in them"]
        number = snapshot.number(value)
        return [Tag.OBJECT_ARRAY, number, list(value.shape), snapshot.items(value.reshape(-1).tolist(), depth)]
    text, shape = dtype_text(value.dtype), list(value.shape)
    if value.nbytes > SMALL_BYTES:
        return _record_large(snapshot, value, text, shape)
    number = snapshot.number(value)
    base = value.base
    if type(base) is numpy.ndarray and base.nbytes <= SMALL_BYTES and not base.dtype.hasobject and base.base is None:
        offset = value.ctypes.data - base.ctypes.data
        return [Tag.ARRAY, number, text, shape, b"", "C", snapshot.node(base, depth + 1), list(value.strides), offset]
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return [Tag.ARRAY, number, text, shape, value.tobytes(order), order, None, None, 0]  # type: ignore[arg-type]


def _record_large(snapshot: Snapshot, value: numpy.ndarray[Any, Any], text: str, shape: list[int]) -> Any:
    digest, is_changing = follow_array(value)
    if not is_changing:
        return [Tag.ARRAY_DATA, text, shape, digest]
    node = [Tag.CHANGED_ARRAY, snapshot.number(value), text, shape, len(snapshot.blobs)]
    snapshot.blobs.append(torch.from_numpy(numpy.ascontiguousarray(value).reshape(-1).view("u1").copy()))
    return node


def record_other_array(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Matrices, masked and record arrays: compared."""
    if value.dtype.hasobject:
        return [Tag.REFUSED, f"is a {type(value).__name__} of objects"]
    mask = numpy.ma.getmaskarray(value) if isinstance(value, numpy.ma.MaskedArray) else None
    digests = [follow_array(numpy.asarray(part))[0].hex() for part in (value, mask) if part is not None]
    return [Tag.SAME, name_of(type(value)), f"{dtype_text(value.dtype)} {list(value.shape)} {' '.join(digests)}"]


def restore_array(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """In place if the live array is alike, else a new one."""
    _, number, text, shape, raw, order, base_node, strides, offset = node
    dtype = dtype_of(text)
    is_map = type(live) is numpy.memmap and live.flags.writeable  # what is written into it stands in a file
    is_alike = (is_map or type(live) is numpy.ndarray) and live.dtype == dtype and list(live.shape) == shape
    if base_node is not None:
        old = live.base if is_alike and live.base is not None else MISSING
        base = restore.value(old, base_node, f"{name}.base")
        if base is MISSING:
            return restore.refuse(live, f"{name} is a view of an array that could not be restored")
        if is_alike and base is old and list(live.strides) == strides:
            is_there = live.ctypes.data - base.ctypes.data == offset
            if is_there and restore.claim(number, live):
                return live
        made: Any = numpy.ndarray(shape, dtype, base, offset, strides)
        restore.claim(number, made)
        return made
    found = numpy.frombuffer(raw, dtype=dtype).reshape(shape, order=order).copy(order)
    if is_alike and (is_map or live.base is None) and live.flags.writeable and restore.claim(number, live):
        if live.tobytes(order) != raw:
            live[...] = found
        return live
    restore.claim(number, found)
    return found


def restore_object_array(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """An array of objects."""
    _, number, shape, nodes = node
    is_alike = type(live) is numpy.ndarray and live.dtype == object and list(live.shape) == shape
    items = restore.items(live.reshape(-1).tolist() if is_alike else [], nodes, name)
    target: Any = live if is_alike and restore.claim(number, live) else numpy.empty(shape, dtype=object)
    restore.claim(number, target)
    if len(items) == target.size:
        target.reshape(-1)[:] = items
    return target


def compare_array(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """What the replay has loaded again."""
    _, text, shape, expected = node
    if not restore.is_comparing:
        return live
    if not isinstance(live, numpy.ndarray) or dtype_text(live.dtype) != text or list(live.shape) != shape:
        restore.is_same(False, name, "is another array than in the lost rank")
    else:
        restore.is_same(follow_array(live)[0] == expected, name, "holds other data than in the lost rank")
    return live


def restore_changed_array(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """A large array that the script changes: from the record's blobs."""
    _, number, text, shape, index = node
    found = numpy.frombuffer(restore.blob(index), dtype=dtype_of(text)).reshape(shape)
    if isinstance(live, numpy.ndarray) and live.dtype == found.dtype and list(live.shape) == shape:
        if not live.flags.writeable:
            return restore.refuse(live, f"{name} is an array that can be written in the lost rank and not here")
        if restore.claim(number, live):
            live[...] = found
            return live
    if live is not MISSING and not isinstance(live, numpy.ndarray):
        return restore.refuse(live, f"{name} is an array in the lost rank and {told(live)} here")
    made = found.copy()
    restore.claim(number, made)
    return made
