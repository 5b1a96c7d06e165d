"""Refuse a script that carries gradients across a step.

Gradients at a boundary are not recorded, since nearly every script zeroes them before it uses them again. After a
replay they are made NaN; if NaN is left when their optimizer steps for the first time, the script has added to
gradients that are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ttprun.rank.weights.sharded import local_of
from ttprun.rank.weights.tensor_bytes import elements_of

CARRIED = (
    "the script carries gradients across an optimizer step, and those of the lost rank are lost: call zero_grad() in "
    "each step"
)
_poisoned: list[torch.optim.Optimizer] = []


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found: list[Any] = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return [local_of(gradient) for gradient in found if gradient is not None]


def poison(optimizers: list[torch.optim.Optimizer]) -> None:
    """The replay is over: its gradients become NaN."""
    for optimizer in optimizers:
        for gradient in _gradients(optimizer):
            elements_of(gradient.detach()).fill_(float("nan"))
        _poisoned.append(optimizer)


def forget() -> None:
    """The run of the script is over."""
    _poisoned.clear()


def are_carried_over(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is about to step has gradients of the replay; True at most once per optimizer."""
    if not any(optimizer is known for known in _poisoned):
        return False
    _poisoned[:] = [known for known in _poisoned if known is not optimizer]
    return any(bool(torch.isnan(elements_of(gradient)).any()) for gradient in _gradients(optimizer))


def are_of_replay(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the input of a collective is made of gradients of the replay, whose optimizer has not stepped since."""
    return bool(_poisoned) and any(bool(torch.isnan(elements_of(tensor)).any()) for tensor in tensors)
