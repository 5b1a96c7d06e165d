"""Optimizers that use the gradients of one backward: which boundaries lie between their steps.

With Muon for the matrices and AdamW for the rest, both step after each backward. At the boundary between the two steps
the gradients of the second are needed, and are in no record, nor in a snapshot: no run can resume there. So it counts
as open (`open_boundaries.py`).

A GAN's discriminator has new gradients at its generator's step, too, but zeroes them before it steps. So what counts
is what an optimizer did at its newest step: whether it used a gradient that had been there at another optimizer's step,
with no backward in between. Before its first step, new gradients count. One gradient of each optimizer is looked at,
and none of one that lets more steps pass than a snapshot is postponed for. Begin with `look`.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from ttprun.introspect.distributed_tensors import local_of
from ttprun.tensors.open_boundaries import MOST_PUT_OFF
from ttprun.tensors.optimizer_registry import optimizers, parameters_of


class _Mark(NamedTuple):
    """One gradient as it was: it is the same as long as no other takes its place, and as it was if nothing writes."""

    gradient: weakref.ref[torch.Tensor]
    version: int


class _Seen:
    """What was seen of an optimizer.

    used     its gradient after its newest step
    awaited  its gradient at the newest step of another optimizer, if it was new and no backward has begun since
    shares   whether its newest step used the latter; None: it has not stepped yet
    passed   steps of other optimizers since its newest one
    """

    def __init__(self) -> None:
        self.passed = 0
        self.used: _Mark | None = None
        self.awaited: _Mark | None = None
        self.shares: bool | None = None


_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()


def look(optimizer: torch.optim.Optimizer) -> bool:
    """Called before each step: whether another optimizer is to use gradients that exist already.

    optimizer   about to step
    """
    living = optimizers()
    if len(living) < 2:
        return False
    is_awaited = False
    for one in living:
        seen, now = _seen.setdefault(one, _Seen()), _mark(one)
        if one is optimizer:  # what unscales or clips its gradients has written to them
            seen.shares = now is not None and seen.awaited is not None and now.gradient() is seen.awaited.gradient()
        else:
            seen.passed += 1
            seen.awaited = None if _are_same(now, seen.used) else now
            may_step_soon = seen.shares is not False and seen.passed <= MOST_PUT_OFF
            is_awaited = is_awaited or (may_step_soon and seen.awaited is not None)
    return is_awaited


def note_backward() -> None:
    """A backward begins: what it leaves is of it, or was zeroed before."""
    for seen in _seen.values():
        seen.awaited = None


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer has taken its step, which may have written to its gradients."""
    if (seen := _seen.get(optimizer)) is not None:
        seen.used, seen.awaited, seen.passed = _mark(optimizer), None, 0


def _mark(optimizer: torch.optim.Optimizer) -> _Mark | None:
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None:
            return _Mark(weakref.ref(gradient), local_of(gradient)._version)
    return None


def _are_same(now: _Mark | None, before: _Mark | None) -> bool:
    if now is None or before is None:
        return now is before
    return now.gradient() is before.gradient() and now.version == before.version


def forget() -> None:
    """The run of the script is over."""
    _seen.clear()
