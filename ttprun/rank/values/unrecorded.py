"""What stands in a replacement for what the lost rank had computed with gradients in the step that it had finished.

Of a large activation nothing is recorded. Mostly nobody looks at it again: `logits` is set anew in the next step. Who
does look is told so, whatever is tried. Of a small one (`loss`) there are the elements, but not what they were computed
from: who goes backward through it, as scripts with two optimizers do (`fake` of a GAN), is told so.
"""

from __future__ import annotations

from typing import Any

import torch

from ttprun.rank.weights.sharded import local_of


class UnrecordedTensorError(RuntimeError):
    """The script uses of a tensor of the step before what was not recorded."""


class _NotRecorded(torch.autograd.Function):
    """What a tensor was computed from, in its stead."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, computed: list[torch.Tensor], name: str) -> torch.Tensor:
        ctx.name = name
        return computed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnrecordedTensorError(
            f"{ctx.name} was computed before an optimizer step, and the script goes backward through it after that "
            "step: what it was computed from is not recorded"
        )


def without_history(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor as one that was computed with gradients; backward() through it raises UnrecordedTensorError."""
    made: torch.Tensor = _NotRecorded.apply(torch.empty(0, requires_grad=True), [tensor], name)  # type: ignore[no-untyped-call]
    return made


def forget_gradient(tensor: torch.Tensor) -> None:
    """A gradient that is in no record becomes NaN, so that using it cannot pass unseen: see gradients.py."""
    if tensor.is_leaf and tensor.grad is not None:
        local_of(tensor.grad).detach().fill_(float("nan"))


class Unrecorded:
    """Raises UnrecordedTensorError at every use."""

    __slots__ = ("__weakref__", "_shape", "_told")

    def __init__(self, name: str, shape: list[int]) -> None:
        object.__setattr__(self, "_told", f"{name} of shape {shape}")
        object.__setattr__(self, "_shape", shape)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # isinstance may ask
            return Unrecorded
        raise UnrecordedTensorError(f"{told(self)} is used after the optimizer step and is too large to record")


def told(value: Unrecorded) -> str:
    """Which variable it is, and the shape that it had."""
    found: str = object.__getattribute__(value, "_told")
    return found


def shape_of(value: Unrecorded) -> list[int]:
    """The shape of the tensor that it stands for."""
    found: list[int] = object.__getattribute__(value, "_shape")
    return found


def _refuse(self: Unrecorded, *args: Any, **kwargs: Any) -> Any:
    return self.shape


def _refuse_in_torch(cls: Any, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
    for argument in (*args, *(kwargs or {}).values()):
        _refuse(argument) if type(argument) is Unrecorded else None
    raise UnrecordedTensorError("a tensor that is used after the optimizer step is too large to record")


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
