"""A tensor's history, the graph by which backward() goes through it, is in no record.

So if one is computed before a boundary, and the script calls backward on it after that (`fake` of a GAN after the
discriminator's step), no run can resume from the boundary. That cannot be predicted exactly; but a backward() frees the
tensors that a graph has saved, so if they are still there, another one is likely to follow (`is_awaited`).

A replacement gets stand-ins for tensors that the lost rank had computed with gradients in its finished step. A large
activation is not recorded. Mostly it is not used again: `logits` is computed again in the next step. Any use of its
stand-in raises. Of a small one (`loss`) the elements are recorded, but not the graph: backward() on it, as scripts with
two optimizers do, raises.
"""

from __future__ import annotations

from typing import Any

import torch

from ttprun import torch_versions
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.safe_reads import of_types
from ttprun.protocol.reason import pointer

_EXPLAINED = pointer("activation-used-later")

_MOST_NODES = 256
_KEPT = "_raw_saved_"
_has_hooks = False


def wrap_saved_tensors_hooks(original: Any) -> Any:
    """saved_tensors_hooks.__enter__: from now on unpacking a saved tensor may run code of the script."""

    def enter(self: Any) -> Any:
        global _has_hooks
        _has_hooks = True
        return original(self)

    return enter


def is_awaited(tensor: torch.Tensor) -> bool:
    """Whether a tensor's graph is still kept for a backward().

    Unpacks nothing that torch.autograd.graph.saved_tensors_hooks has packed. False if nothing had to be saved (a sum of
    weights), since that cannot be seen.
    """
    nodes = [tensor.grad_fn]
    met: set[Any] = set()
    is_kept = False
    while nodes and len(met) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        keeps = _keeps(node)
        if keeps is False:
            # A backward() has freed it: of `_, best = outputs.max(1)`, `_` is left, but no other backward() follows.
            return False
        is_kept = is_kept or keeps is True
        nodes += [before for before, _ in node.next_functions]
    return is_kept


@of_types
def _names_of_kept(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith(_KEPT)]


def _keeps(node: Any) -> bool | None:
    """Whether a node of the graph still keeps something, which is freed all at once; None if it never did."""
    for name in _names_of_kept(type(node)):
        try:
            value = getattr(node, name)
        except Exception:  # a torch.autograd.Function raises if it is freed; other kinds are unknown
            return False
        for part in value if isinstance(value, tuple | list) else (value,):
            if part is not None:
                is_kept = torch_versions.still_holds(node, name, part, _has_hooks)
                if is_kept is not None:
                    return is_kept
    return None


class UnrecordedTensorError(RuntimeError):
    """The script uses a part of a tensor of the previous step that was not recorded."""


class _NotRecorded(torch.autograd.Function):
    """The stand-in for a tensor's graph."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, computed: list[torch.Tensor], name: str) -> torch.Tensor:
        ctx.name = name
        return computed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnrecordedTensorError(
            f"{ctx.name} was computed before an optimizer step, and the script calls backward on it after that step: "
            f"its graph is not recorded{_EXPLAINED}"
        )


def without_history(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor as one that was computed with gradients; backward() through it raises UnrecordedTensorError.

    tensor   floating or complex, any shape and device; the result shares its memory
    name     of the variable, for the error
    """
    made: torch.Tensor = _NotRecorded.apply(torch.empty(0, requires_grad=True), [tensor], name)  # type: ignore[no-untyped-call]
    return made


def forget_gradient(tensor: torch.Tensor) -> None:
    """Make a gradient that is not recorded NaN, so that its use is noticed: see gradients.py.

    tensor   any; changed only if it is a leaf with a gradient
    """
    if tensor.is_leaf and tensor.grad is not None:
        local_of(tensor.grad).detach().fill_(float("nan"))


class Unrecorded:
    """Raises UnrecordedTensorError at every use."""

    __slots__ = ("__weakref__", "_description", "_shape")

    def __init__(self, name: str, shape: list[int]) -> None:
        object.__setattr__(self, "_description", f"{name} of shape {shape}")
        object.__setattr__(self, "_shape", shape)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # isinstance may ask
            return Unrecorded
        raise UnrecordedTensorError(
            f"{description_of(self)} is used after the optimizer step and is too large to record{_EXPLAINED}"
        )


def description_of(value: Unrecorded) -> str:
    """Its variable and shape."""
    description: str = object.__getattribute__(value, "_description")
    return description


def shape_of(value: Unrecorded) -> list[int]:
    """The shape of the tensor that it stands for."""
    shape: list[int] = object.__getattribute__(value, "_shape")
    return shape


def _refuse(self: Unrecorded, *args: Any, **kwargs: Any) -> Any:
    return self.shape


def _refuse_in_torch(cls: Any, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
    for argument in (*args, *(kwargs or {}).values()):
        _refuse(argument) if type(argument) is Unrecorded else None
    raise UnrecordedTensorError(f"a tensor that is used after the optimizer step is too large to record{_EXPLAINED}")


_USES = (
    "repr str format bytes hash bool len iter next reversed contains getitem setitem delitem setattr delattr call "
    "eq ne lt le gt ge int float complex index round trunc floor ceil neg pos abs invert array "
    "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor "
    "radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rmatmul rlshift rrshift rand ror rxor "
    "iadd isub imul itruediv ifloordiv imod ipow imatmul ilshift irshift iand ior ixor "
    "copy deepcopy reduce reduce_ex getstate sizeof dir enter exit dlpack"
)
for _use in _USES.split():
    setattr(Unrecorded, f"__{_use}__", _refuse)
Unrecorded.__torch_function__ = classmethod(_refuse_in_torch)  # type: ignore[attr-defined]
