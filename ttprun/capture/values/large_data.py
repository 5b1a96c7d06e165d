"""Large tensors and arrays in a record: compared, or recorded whole once they are known to change (see large.py).

`first` of a changed one is the number of the first one that begins at the same address. A dtype of numpy begins with
its byte order or a bracket, one of torch with a letter.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy
import torch

from ttprun.capture.records.nodes import ChangedDataNode, DataNode, Number
from ttprun.capture.values.large import address_of, age_of, follow, note_restored
from ttprun.capture.values.plain import dtype_of, dtype_text
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.type_names import MISSING
from ttprun.capture.values.unrecorded import forget_gradient
from ttprun.introspect.looks import is_a
from ttprun.introspect.tensor_bytes import plain


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in `torch`."""
    return str(dtype).removeprefix("torch.")


def tensor_of(dtype: str, shape: list[int], raw: bytes | memoryview) -> torch.Tensor:
    """A new tensor from recorded bytes.

    dtype     torch's name without "torch.", such as "float32"
    raw       its elements, contiguous; empty: the elements are not set
    returns   a contiguous tensor on the CPU, of this shape
    """
    kind = getattr(torch, dtype)
    if not len(raw):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape)


def form_of(value: Any) -> tuple[str, list[int]] | None:
    """(dtype, shape) of a tensor or array; None of anything else."""
    if is_a(value, torch.Tensor):
        return dtype_name(value.dtype), list(value.shape)
    return (dtype_text(value.dtype), list(value.shape)) if is_a(value, numpy.ndarray) else None


def record_data(snapshot: Snapshot, value: Any, digest: bytes, is_changing: bool) -> DataNode | ChangedDataNode:
    """A large tensor or array: by its digest, or in a blob if the script changes it.

    value                 any dtype, shape and device
    digest, is_changing   as `follow` returns them
    """
    dtype, shape = form_of(value) or ("", [])
    if not is_changing:
        return DataNode(dtype, shape, digest, age_of(value))
    is_tensor = is_a(value, torch.Tensor)
    snapshot.blobs.append(plain(value if is_tensor else torch.from_numpy(_bytes_of(value).copy())))
    number = snapshot.number(value)
    first = Number(snapshot.storages.setdefault(address_of(value), number))
    return ChangedDataNode(number, dtype, shape, len(snapshot.blobs) - 1, first)


def _bytes_of(array: Any) -> Any:
    return numpy.ascontiguousarray(array).reshape(-1).view("u1")


def compare_data(restore: Restore, live: Any, node: DataNode, name: str) -> Any:
    """Compare what the replay has loaded again, by dtype, shape and digest; it stays in any case."""
    dtype, shape = node.dtype, node.shape
    if not restore.is_comparing:
        return live
    if node.age:
        restore.note_age(name, node.age)
    form = form_of(live)
    if form is None:
        restore.is_same(False, name, "is large data in the lost rank and not in the replacement")
    elif form != (dtype, shape):
        restore.is_same(False, name, f"has shape {form[1]} of {form[0]} where the lost rank had {shape} of {dtype}")
    else:
        restore.is_same(follow(live)[0] == node.digest, name, "has other data than in the lost rank")
        if isinstance(live, torch.Tensor):
            forget_gradient(live)
    return live


def restore_changed_data(restore: Restore, live: Any, node: ChangedDataNode, name: str) -> Any:
    """Restore what the script changes from the record's blobs, in place if the live one has the same form.

    live   a tensor or array of any device, or anything else; a new one is on the CPU
    """
    number, dtype, shape = node.number, node.dtype, node.shape
    raw = restore.blob(node.blob)
    is_tensor = dtype[0].isalpha()
    recorded: Any = tensor_of(dtype, shape, raw) if is_tensor else numpy.frombuffer(raw, dtype_of(dtype)).reshape(shape)
    is_alike = form_of(live) == (dtype, shape)
    if is_alike and not is_tensor and not live.flags.writeable:
        return restore.refuse(live, f"{name} is an array that can be written in the lost rank and not here")
    if is_alike and not (is_tensor and live.grad_fn is not None) and restore.claim(number, live):
        if is_tensor:
            live.data.copy_(recorded)
            if restore.is_comparing:
                forget_gradient(live)
        else:
            live[...] = recorded
        made = live
    else:
        made = recorded if is_tensor else recorded.copy()
        restore.claim(number, made)
    note_restored(made)
    other = restore.object_of(node.first)
    if other is not MISSING and address_of(other) != address_of(made):
        return restore.refuse(live, f"{name} shares its memory with another variable in the lost rank, and not here")
    return made
