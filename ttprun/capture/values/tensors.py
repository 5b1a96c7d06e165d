"""Tensors in variables.

Small ones are recorded with their storage, so that what shared memory in the lost rank shares it again. The contents
are bytes, or [index of a blob], or the number of the tensor that came with the storage. `layout` is [stride, offset,
bytes of the storage], None for a tensor that is all of its storage, False for a small part of a large one or of a large
numpy array. Such a part alone has a place: [[stride, offset, bytes of the storage, conjugated, negated], how many
numbers before the first part of that storage has its own, whether that is a part of an array, whether the whole is
known to change]. A leaf that is learnt alone has a gradient: its bytes, None if there is none, False if it has another
form. Those that optimizers update come from a peer; only which of them it is is recorded. Large ones: see large.py.

A sharded tensor (DTensor: a parameter itself, the norm of its gradients, an average of weights) has the layout [shape
of the whole, how it is sharded]. Meshes are not recorded, so the replay must have made a tensor that is sharded alike:
its local part is written.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import torch
from msgspec.structs import replace

from ttprun.capture.records.nodes import (
    ActivationNode,
    AnyNode,
    RefusedNode,
    SameNode,
    ShardedNode,
    TensorNode,
    WeightNode,
)
from ttprun.capture.records.packing import MISSING, name_of
from ttprun.capture.values.arrays import is_changing
from ttprun.capture.values.autograd_graphs import Unrecorded, forget_gradient, shape_of, without_history
from ttprun.capture.values.large import (
    SMALL_BYTES,
    array_around,
    dtype_name,
    follow,
    is_followed,
    record_data,
    tensor_of,
)
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.device import accelerator
from ttprun.introspect.model_tensors import is_distributed, local_of, waited_for
from ttprun.introspect.safe_reads import dictionary_of, is_a
from ttprun.introspect.tensor_bytes import plain

_LEAF, _PARAMETER, _COMPUTED = 1, 2, 4  # flags; the last: with gradients, from what is not recorded
INLINE_BYTES = 4 << 10  # up to here contents stand in the node


def _is_parameter(value: torch.Tensor) -> bool:
    """As isinstance() with torch.nn.Parameter, for which torch asks the tensor."""
    return is_a(value, torch.nn.Parameter) or bool((dictionary_of(value) or {}).get("_is_param"))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    size = tensor.nbytes
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


def record_tensor(snapshot: Snapshot, value: torch.Tensor, depth: int) -> Any:
    """Any tensor: what optimizers update by its place, a small one with its bytes, a large one as data.

    value   any dtype, shape, strides and device; sparse and "meta" ones are only compared, quantized ones refused
    """
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        return _record_unusual(value)
    try:
        storage = value.untyped_storage()
        at = storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
        result = waited_for(value)
        if result is not value:
            return _record_result(snapshot, value, result)
        return RefusedNode(f"is a {name_of(type(value))} without memory of its own")
    index = snapshot.stepped.get(at)
    dtype, shape = dtype_name(value.dtype), list(value.shape)
    if index is not None and at:
        offset: Any = value.storage_offset()
        own = snapshot.stepped.get(value.data_ptr()) if offset else None
        return weight_node(value, index, offset) if own is None else weight_node(value, own, None)
    if not at and value.nbytes:
        return ActivationNode(shape)  # its memory is freed, as FSDP1's of the whole: asked for its history it may raise
    if value.grad_fn is not None:
        snapshot.computed.append(value)
    if value.nbytes > SMALL_BYTES:
        return _record_large(snapshot, value)
    number = snapshot.number(value)
    flags = 0
    if value.requires_grad and value.is_leaf:
        flags = _LEAF | (_PARAMETER if _is_parameter(value) else 0)
    elif value.grad_fn is not None:
        flags = _COMPUTED
    device = "" if value.device.type == "cpu" else str(value.device)
    size = storage.nbytes()

    def node(layout: Any, contents: bytes | list[int] | int, place: list[Any] | None = None) -> TensorNode:
        gradient = _gradient(value) if flags & _LEAF else None
        return TensorNode(number, dtype, shape, layout, contents, flags, device, place, gradient)

    is_resizable = storage.resizable()
    array = None if is_resizable or not size else array_around(at)
    if size > SMALL_BYTES or value.is_conj() or value.is_neg() or device or array is not None:
        first_part = snapshot.parts.setdefault(at, number)
        is_held = _is_held(snapshot, value) if array is None else is_changing(snapshot, array)
        place = [_form(value), number - first_part, array is not None, is_held]
        return node(False, _contents(snapshot, value if device else plain(value)), place)
    first, further = snapshot.storages.get(at), 0
    if first is None and snapshot.data:
        first, further = snapshot.owner_of(at)
    if first is None and not is_resizable:
        first, further = _in_array(snapshot, at)
    if first is None and size == value.nbytes and value.is_contiguous():
        if size:
            snapshot.storages[at] = number
        return node(None, _contents(snapshot, value))
    layout = [list(value.stride()), value.storage_offset() + further // value.element_size(), size]
    if first is None:
        snapshot.storages[at] = number
        return node(layout, _contents(snapshot, _whole(storage)))
    return node(layout, first)


def _record_result(snapshot: Snapshot, value: torch.Tensor, result: torch.Tensor) -> Any:
    """The result of a functional collective, in place of the wrapper by which it is waited for."""
    if value.grad_fn is None:
        return record_tensor(snapshot, result, 0)
    snapshot.computed.append(value)
    if result.nbytes > SMALL_BYTES:
        return ActivationNode(list(value.shape))
    node = record_tensor(snapshot, result, 0)
    return replace(node, flags=node.flags | _COMPUTED) if isinstance(node, TensorNode) else node


def _in_array(snapshot: Snapshot, at: int) -> tuple[int | None, int]:
    """(number, bytes before the address) of the recorded array in whose memory an address lies."""
    places = ((number, at - begin) for begin, end, number in snapshot.memories if begin <= at < end)
    return next(places, (None, 0))


def weight_node(value: torch.Tensor, index: int, offset: int | torch.SymInt | None) -> WeightNode:
    """The node of what optimizers update, or of a view of it.

    index    place in `Restore.stepped`
    offset   in its storage; of a sharded one, in that of what this rank holds; None: where that weight begins, which
             is a part of a flat buffer that may lie elsewhere in another process
    """
    is_itself = _is_parameter(value)
    form = (dtype_name(value.dtype), list(value.shape), list(value.stride()))
    return WeightNode(index, *form, None if offset is None else int(offset), is_itself, value.grad_fn is not None)


def _contents(snapshot: Snapshot, tensor: torch.Tensor) -> bytes | list[int]:
    """The elements of a `plain` tensor, or of one on a device, or the blob that they will be."""
    size = tensor.nbytes
    if not tensor.is_cpu:
        if size and not snapshot.is_separate:
            snapshot.blobs.append(tensor.detach())  # all are copied together
            return [len(snapshot.blobs) - 1]
        tensor = plain(tensor)
    if snapshot.is_separate or size <= INLINE_BYTES:
        return ctypes.string_at(tensor.data_ptr(), size) if size else b""
    snapshot.blobs.append(tensor)
    return [len(snapshot.blobs) - 1]


def _gradient(leaf: torch.Tensor) -> bytes | bool | None:
    gradient = leaf.grad
    if gradient is None:
        return None
    is_alike = gradient.layout is torch.strided and gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
    return raw_bytes(gradient) if is_alike else False


def _form(value: torch.Tensor) -> list[Any]:
    form = [list(value.stride()), value.storage_offset(), value.untyped_storage().nbytes()]
    return [*form, value.is_conj(), value.is_neg()]


def _is_held(snapshot: Snapshot, value: torch.Tensor) -> bool:
    """Whether it is a part of a tensor that the script is known to change, or that a module has recorded."""
    base = value._base
    return (
        base is not None
        and value.grad_fn is None
        and (id(base) in snapshot.numbers or (is_followed(base) and follow(base)[1]))
    )


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _record_large(snapshot: Snapshot, value: torch.Tensor) -> AnyNode:
    if value.grad_fn is not None:
        return ActivationNode(list(value.shape))
    digest, is_changing = follow(value)
    return record_data(snapshot, value, digest, is_changing)


def _record_unusual(value: torch.Tensor) -> Any:
    """Sparse, quantized and shapes without data: compared."""
    what = f"{value.layout} {value.dtype} {list(value.shape)}"
    if value.is_meta:
        return SameNode("torch:Tensor", f"meta {what}")
    if value.layout is torch.sparse_coo:
        parts = [value._indices(), value._values()]
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [value.ccol_indices(), value.row_indices(), value.values()]
    else:
        return RefusedNode(f"is a tensor of {what}")
    digests = " ".join(follow(part.detach())[0].hex() for part in parts)
    return SameNode("torch:Tensor", f"{what} {digests}")


def record_unrecorded(snapshot: Snapshot, value: Unrecorded, depth: int) -> Any:
    """A large activation that a repair before has not brought back either."""
    return ActivationNode(shape_of(value))


def restore_activation(restore: Restore, live: Any, node: ActivationNode, name: str) -> Any:
    """Something that says so when it is used; on the way to the boundary what the replay itself has computed."""
    if not restore.is_comparing and isinstance(live, torch.Tensor) and list(live.shape) == node.shape:
        return live
    return Unrecorded(name, node.shape)


def restore_tensor(restore: Restore, live: Any, node: TensorNode, name: str) -> Any:
    """In place where the live tensor lies in memory as the recorded one, else a new one; with its gradient.

    live   anything; written if its dtype, shape and device are the recorded ones
    """
    tensor = _restored(restore, live, node, name)
    if node.flags & _LEAF and restore.is_comparing:
        raw = node.gradient
        _restore_gradient(tensor, tensor_of(node.dtype, node.shape, raw) if isinstance(raw, bytes) else raw)
    return tensor


def _restore_gradient(leaf: torch.Tensor, gradient: Any) -> None:
    """Write a gradient; None: the lost rank had none, False: it is not known."""
    if gradient is None:
        leaf.grad = None
        return
    if leaf.grad is None or leaf.grad.layout is not torch.strided:
        leaf.grad = torch.zeros_like(leaf)
    if gradient is False:
        forget_gradient(leaf)
    else:
        leaf.grad.data.copy_(gradient)


def _restored(restore: Restore, live: Any, node: TensorNode, name: str) -> Any:
    number, dtype, shape, layout, flags = node.number, node.dtype, node.shape, node.layout, node.flags
    device = node.device
    raw: Any = restore.blob(node.contents[0]) if isinstance(node.contents, list) else node.contents
    if device and accelerator.has_graphs and _is_of_kind(live, node):
        # A graph that the set-up has captured may read and write it where it lies, and it only has this one.
        place: Any = node.place
        if not (_lies_there(restore, live, number - place[1], place[0]) and restore.claim(number, live)):
            return restore.refuse(live, f"{name} lies elsewhere here, and a graph of the device may use it")
        live.data.copy_(tensor_of(dtype, shape, raw))
        return _flagged(live, flags & ~_COMPUTED, name)
    if flags & _COMPUTED and _is_kept_on_the_way(restore, live, node) and restore.claim(number, live):
        restore.hold(number, live.untyped_storage())
        live.data.copy_(tensor_of(dtype, shape, raw))  # its version, on which the graph depends, stays
        return live
    if flags & _COMPUTED or not _is_like(live, dtype, shape, device):
        live = MISSING
    if layout is False:
        assert node.place is not None
        form, before, is_of_array, is_held = node.place
        is_there = live is not MISSING and _lies_there(restore, live, number - before, form)
        if is_there and raw_bytes(live) != raw:
            # Of a whole that does not change it is the same part of another one, and where in an array it lies is not
            # to be seen.
            is_there = is_held and not is_of_array
            if is_there:
                live.data.copy_(tensor_of(dtype, shape, raw))
        if is_there and restore.claim(number, live):
            return _flagged(live, flags, name)
        if is_held:
            return restore.refuse(live, f"{name} is a part of a larger tensor that changes, and lies elsewhere here")
        made = _flagged(tensor_of(dtype, shape, raw).to(device or "cpu"), flags, name)
        restore.claim(number, made)
        return made
    if live is not MISSING and _fits(restore, live, number, layout, raw) and restore.claim(number, live):
        return _flagged(live, flags, name)
    storage = _storage(restore, number, raw)
    if storage is None:
        return restore.refuse(live, f"{name} shares memory with a tensor that could not be restored")
    stride, offset, _ = layout or (list(torch.empty(shape, device="meta").stride()), 0, 0)
    made = torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, offset, shape, stride)
    made = _flagged(made, flags, name)
    restore.claim(number, made)
    return made


def _is_of_kind(live: Any, node: TensorNode) -> bool:
    """Whether a live value may be what is recorded: a tensor of its form, with a history or without."""
    return (
        type(live) in (torch.Tensor, torch.nn.Parameter)
        and (live.grad_fn is not None) == bool(node.flags & _COMPUTED)
        and _is_like(live.detach(), node.dtype, node.shape, node.device)
    )


def _is_kept_on_the_way(restore: Restore, live: Any, node: TensorNode) -> bool:
    """Whether the replay, not yet at the boundary, can go backward through its own tensor as the lost rank has."""
    if restore.is_comparing or node.layout is not None or type(live) is not torch.Tensor or live.grad_fn is None:
        return False
    if dtype_name(live.dtype) != node.dtype or list(live.shape) != node.shape:
        return False
    if str(live.device) != (node.device or "cpu"):
        return False
    return live.is_contiguous() and live.untyped_storage().nbytes() == live.nbytes


def _is_like(live: Any, dtype: str, shape: list[int], device: str) -> bool:
    """Whether a live value is a tensor of this form, with no history."""
    if type(live) not in (torch.Tensor, torch.nn.Parameter) or live.layout is not torch.strided:
        return False
    is_there = str(live.device) == (device or "cpu") and live.grad_fn is None
    return is_there and dtype_name(live.dtype) == dtype and list(live.shape) == shape


def _lies_there(restore: Restore, live: torch.Tensor, first: int, form: list[Any]) -> bool:
    """Whether a live tensor is the same part of a storage, of that which stands for the recorded one."""
    if _form(live) != form:
        return False
    storage = live.untyped_storage()
    counterpart = restore.storages.get(first)
    if counterpart is None and not _is_taken(restore, storage):
        counterpart = restore.hold(first, storage)
    return counterpart is not None and counterpart.data_ptr() == storage.data_ptr()


def _is_taken(restore: Restore, storage: torch.UntypedStorage) -> bool:
    return storage.data_ptr() in restore.taken


def _fits(restore: Restore, live: torch.Tensor, number: int, layout: Any, raw: Any) -> bool:
    """Whether a live tensor can stand for the recorded one; if so, its storage is written."""
    storage = live.untyped_storage()
    if layout is None:
        if storage.nbytes() != live.nbytes or not live.is_contiguous():
            return False
    elif [list(live.stride()), live.storage_offset(), storage.nbytes()] != layout:
        return False
    if isinstance(raw, int):
        counterpart = _storage(restore, number, raw)
        return counterpart is not None and counterpart.data_ptr() == storage.data_ptr()
    if storage.nbytes() != len(raw):
        return False
    if len(raw) and _is_taken(restore, storage):
        return False
    restore.hold(number, storage)
    if len(raw):
        _whole(storage).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return True


def _storage(restore: Restore, number: int, raw: Any) -> torch.UntypedStorage | None:
    if isinstance(raw, int):
        owner = restore.object_of(raw)
        if raw not in restore.storages and type(owner) is torch.Tensor:
            restore.hold(raw, owner.untyped_storage())
        if raw not in restore.storages and isinstance(owner, numpy.ndarray):
            restore.hold(raw, torch.from_numpy(owner.reshape(-1, order="A").view("u1")).untyped_storage())
        return restore.storages.get(raw)
    made = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
    return restore.hold(number, made.untyped_storage())


def _flagged(tensor: torch.Tensor, flags: int, name: str) -> torch.Tensor:
    if flags & _COMPUTED:
        return without_history(tensor, name)
    if flags & _PARAMETER and not isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor)
    if tensor.is_leaf and tensor.requires_grad != bool(flags & _LEAF):
        tensor.requires_grad_(bool(flags & _LEAF))
    return tensor


def restore_weight(restore: Restore, live: Any, node: WeightNode, name: str) -> Any:
    """What optimizers update: nothing is written, but it must be the same one of them.

    live      if it is not, the weight itself or a view of it takes its place
    """
    index, dtype, shape, stride = node.index, node.dtype, node.shape, node.stride
    is_alike = isinstance(live, torch.Tensor) and dtype_name(live.dtype) == dtype and list(live.shape) == shape
    if index >= len(restore.stepped):
        if is_alike:
            return live
        return restore.refuse(live, unlike(name, "torch:Tensor", live, "a weight"))
    whole = restore.stepped[index]
    owner, local = local_of(whole), local_of(live) if is_alike else None
    offset = owner.storage_offset() if node.offset is None else node.offset
    if (
        local is not None
        and local.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
        and local.storage_offset() == offset
    ):
        return live
    if node.is_itself and isinstance(whole, torch.nn.Parameter) and list(whole.shape) == shape:
        return whole
    if whole is not owner and list(owner.shape) != shape:
        # As a state_dict holds it: the same part of the same whole.
        is_whole = [list(whole.shape), list(whole.stride()), owner.storage_offset()] == [shape, stride, offset]
        if is_whole and not node.is_computed and dtype_name(whole.dtype) == dtype:
            return whole.detach()
        return restore.refuse(live, f"{name} is made of a sharded weight, and cannot be made again")
    if dtype_name(owner.dtype) != dtype:
        return restore.refuse(live, f"{name} is a view of a weight that is of another type here")
    reach = offset + 1 + sum((length - 1) * by for length, by in zip(shape, stride, strict=True))
    if 0 not in shape and reach * owner.element_size() > owner.untyped_storage().nbytes():
        return restore.refuse(live, f"{name} is a view of a weight that is smaller here")
    view = owner.detach().as_strided(shape, stride, offset)
    return without_history(view, name) if node.is_computed else view


def record_sharded(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Any DTensor: what optimizers update by its place, else by what this rank holds of it."""
    local = local_of(value)
    at = local.untyped_storage().data_ptr()
    index = snapshot.stepped.get(at)
    if index is not None and at:
        return weight_node(value, index, local.storage_offset())
    if not at and local.nbytes:
        return ActivationNode(list(value.shape))
    if value.grad_fn is not None:
        snapshot.computed.append(value)
    number = snapshot.number(value)
    return ShardedNode(number, snapshot.node(local, depth + 1), _layout(value), value.grad_fn is not None)


def restore_sharded(restore: Restore, live: Any, node: ShardedNode, name: str) -> Any:
    """Write what this rank holds into the replacement's tensor.

    live   a DTensor of the recorded shape and placements, on a mesh of the recorded shape, else it is refused
    """
    layout = node.layout
    if not isinstance(live, torch.Tensor) or not is_distributed(live) or _layout(live) != layout:
        return restore.refuse(
            live,
            unlike(name, "torch:DTensor", live, f"sharded over the ranks ({layout[1]})"),
        )
    # What the replay has computed such a one from is not what the lost rank had; on the way to the boundary it will do.
    is_lost = node.is_computed and (restore.is_comparing or live.grad_fn is None)
    tensor: Any = without_history(live.detach(), name) if is_lost else live
    if not restore.claim_or_refuse(node.number, tensor, name):
        return live
    local = restore.value(tensor._local_tensor, node.local, name)
    if local is MISSING or not isinstance(local, torch.Tensor) or local.shape != tensor._local_tensor.shape:
        return restore.refuse(live, f"{name}: what the lost rank held of it has another shape")
    tensor._local_tensor = local
    return tensor


def _layout(value: Any) -> list[Any]:
    return [list(value.shape), f"{value.placements} over {list(value.device_mesh.shape)} ranks"]
