"""Wrong numbers on purpose: a NaN in a gradient, a flipped bit in a parameter. As with defective memory, no version
counter changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ttprun.introspect.tensor_bytes import bytes_of

if TYPE_CHECKING:
    from ttprun.groups.buckets import Buckets

_REDUCING = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
)


def put_nan(op: str, inputs: Any, buckets: Iterable[Buckets] = ()) -> str:
    """Make the middle element of the first floating tensor NaN, if these are gradients; returns what was done, or "".

    inputs    the operation's argument: a tensor, or nested lists of tensors
    buckets   known buckets of DDP, whose gradient becomes NaN too, as after a real backward pass
    """
    if op not in _REDUCING:
        return ""
    for index, tensor in enumerate(_tensors_in(inputs)):
        if tensor.is_floating_point() and tensor.numel() and _is_gradient(tensor):
            flat = tensor.detach().view(-1)
            at = flat.numel() // 2
            flat.numpy()[at] = float("nan")
            for gradient, place in [part for known in buckets for part in known.parts(flat)]:
                gradient.numpy()[place.isnan().numpy()] = float("nan")
            return f"element {at} of {flat.numel()} in tensor {index} of {op}"
    return ""


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors_in(item)


def _is_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor is reduced during backward (DDP's buckets), or is the gradient of an optimizer's parameter."""
    from ttprun.tensors import optimizer_registry

    if torch._C._current_graph_task_id() != -1:
        return True
    gradients = (
        parameter.grad
        for optimizer in optimizer_registry.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return any(gradient is not None and gradient.data_ptr() == tensor.data_ptr() for gradient in gradients)


def flip_bit(seed: int) -> str:
    """Flip one bit of one parameter that an optimizer holds; returns which. Raises ValueError if there is none."""
    from ttprun.tensors import optimizer_registry

    drawn = random.Random(seed)
    parameters = [
        (f"optimizer {number}, group {group_number}, parameter {index}", parameter)
        for number, optimizer in enumerate(optimizer_registry.optimizers())
        for group_number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter.numel() and parameter.is_contiguous()
    ]
    if not parameters:
        raise ValueError("no optimizer holds a parameter yet")
    name, parameter = drawn.choice(parameters)
    raw = bytes_of(parameter)
    at, bit = drawn.randrange(len(raw)), drawn.randrange(8)
    raw[at] ^= 1 << bit
    return f"bit {bit} of byte {at} in {name}"
