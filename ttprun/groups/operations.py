"""The operations of a process group: which arguments are inputs and outputs, and what must agree between ranks.

torch has two names for some: 2.13 calls `all_gather_single` and the like, older releases `_allgather_base`; 2.15 has
added `gather_single`. OPERATIONS holds all.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

# operation: (argument that holds the inputs, argument that holds the outputs)
OPERATIONS = {
    "allreduce": (0, 0),
    "allreduce_coalesced": (0, 0),
    "broadcast": (0, 0),
    "reduce": (0, 0),
    "allgather": (1, 0),
    "allgather_coalesced": (1, 0),
    "_allgather_base": (1, 0),
    "all_gather_single": (1, 0),
    "allgather_into_tensor_coalesced": (1, 0),
    "all_gather_single_coalesced": (1, 0),
    "gather": (1, 0),
    "gather_single": (1, 0),
    "gather_into_tensor": (1, 0),
    "scatter": (1, 0),
    "reduce_scatter": (1, 0),
    "_reduce_scatter_base": (1, 0),
    "reduce_scatter_single": (1, 0),
    "reduce_scatter_tensor_coalesced": (1, 0),
    "reduce_scatter_single_coalesced": (1, 0),
    "alltoall": (1, 0),
    "alltoall_base": (1, 0),
    "all_to_all_single": (1, 0),
    "barrier": (None, None),
}
# FSDP2 gathers parameters and reduces gradients by these.
REDUCING = frozenset({"_reduce_scatter_base", "reduce_scatter_single"})
GATHERING = frozenset({"_allgather_base", "all_gather_single"}) | REDUCING
# What these leave is the same in all members.
SAME_FOR_ALL = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    }
)
EXCHANGING = frozenset({"alltoall", "alltoall_base", "all_to_all_single"})
# None of these completes anywhere before all members have issued it.
OF_ALL_MEMBERS = GATHERING | {"allreduce", "allreduce_coalesced", "allgather", "barrier"}
# Which argument of a point-to-point operation is sent, and which received; these are not repaired.
POINT_TO_POINT: dict[str, tuple[int | None, int | None]] = {
    "send": (0, None),
    "recv": (None, 0),
    "recv_anysource": (None, 0),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in an operation's argument (a tensor, or nested lists of tensors)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    if len(value) == 1:  # most often
        (only,) = value
        return [only] if isinstance(only, torch.Tensor) else tensors_in(only)
    return [tensor for item in value for tensor in tensors_in(item)]


def with_tensors_replaced(value: Any, replacement: dict[int, torch.Tensor]) -> Any:
    """An argument with other tensors in the places of its own; `replacement` is keyed by id()."""
    if isinstance(value, torch.Tensor):
        return replacement[id(value)]
    if isinstance(value, list):
        return [with_tensors_replaced(item, replacement) for item in value]
    if isinstance(value, tuple):
        return tuple(with_tensors_replaced(item, replacement) for item in value)
    return value


def positional(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in the backend's order; a single tensor stands for a list of one, as in torch's own bindings.

    op             the backend's method
    args, kwargs   as the method was called
    """
    full = args + tuple(kwargs.values()) if kwargs else args
    if op in ("allreduce", "broadcast", "reduce") and isinstance(full[0], torch.Tensor):
        if op == "allreduce":
            options: Any = dist.AllreduceOptions()
            if len(full) > 1 and not isinstance(full[1], dist.AllreduceOptions):
                options.reduceOp = full[1]
            elif len(full) > 1:
                options = full[1]
        else:
            options = dist.BroadcastOptions() if op == "broadcast" else dist.ReduceOptions()
            options.rootRank = full[1]
            options.rootTensor = 0
        return ([full[0]], options)
    return full


def signature_of(op: str, args: tuple[Any, ...]) -> str:
    """What must agree between ranks: the operation, and the tensors' shapes and dtypes where those must be equal."""
    shapes = (
        ",".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors_in(args[0]))
        if op in ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
        else ""
    )
    return f"{with_options(op, args)} {shapes}"


def with_options(op: str, args: tuple[Any, ...]) -> str:
    """The operation, how it reduces and from or to which rank: "allreduce RedOpType.SUM "."""
    options: Any = args[-1] if args else None
    kind: Any = type(options)
    has_reduce_op, has_root = _fields_of(kind)
    reduce_op = options.reduceOp.op if has_reduce_op else None
    return _described(op, reduce_op, options.rootRank if has_root else None)


@functools.cache
def _fields_of(kind: Any) -> tuple[bool, bool]:
    """Whether torch's options of this kind say how to reduce, and a root."""
    return hasattr(kind, "reduceOp"), hasattr(kind, "rootRank")


@functools.cache
def _described(op: str, reduce_op: Any, root: int | None) -> str:
    return f"{op} {'' if reduce_op is None else reduce_op} {'' if root is None else root}"
