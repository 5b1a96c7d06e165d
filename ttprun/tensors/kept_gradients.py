"""Gradients that a backward adds to after the step that has used them: they are state, and kept like it.

Nearly every script zeroes gradients before it uses them again, so they are not recorded. In two kinds of scripts a
backward adds to old ones: a GAN's generator learns through the discriminator, whose are zeroed afterwards; and
some scripts never call zero_grad(). The first steps show whose gradients these are (`gradients.watch`). Others read
them after the step, for a log of their norm: their code shows it (`note_read`). They are copied after each step of
their optimizer. For as long as nothing else has changed them, the copies belong to the optimizer's state
(`replicated.rows`), and reach mirrors, snapshots, checkpoints and replacements with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ttprun.introspect.distributed_tensors import local_of
from ttprun.tensors.optimizer_registry import parameters_of
from ttprun.tensors.sharded import place_of

GRADIENT = "ttprun.gradient"  # name among a parameter's state


@dataclass
class _Kept:
    """One gradient after its optimizer's step.

    gradient  of the parameter
    version   that of its elements then; -1: the copy is another rank's, and is not put back yet
    copy      of it; may be a DTensor
    """

    gradient: torch.Tensor | None
    version: int
    copy: torch.Tensor


_added_to: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_read: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_kept: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, _Kept]] = weakref.WeakKeyDictionary()


class _ForNow(threading.local):
    """What one thread takes for kept, while the mirror's thread may look at the state as well."""

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self.gradients: dict[int, Any] = {}


_for_now = _ForNow()


def note_added_to(optimizer: torch.optim.Optimizer) -> None:
    """A backward adds to what a step of this optimizer has used: keep its gradients from its next step on."""
    _added_to.add(optimizer)


def note_read(optimizer: torch.optim.Optimizer) -> None:
    """The script reads this optimizer's gradients between its step and the next backward: they are kept as well."""
    _read.add(optimizer)
    _added_to.add(optimizer)


def is_added_to(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it was noted."""
    return optimizer in _added_to


def is_kept(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its gradients of the newest boundary are kept."""
    return optimizer in _kept


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer has taken its step. Gradients of others that have changed since theirs are dropped."""
    if not _added_to:
        return
    for other in list(_kept):
        if other is not optimizer and any(map(_has_changed, _kept[other].values())):
            del _kept[other]
    if optimizer not in _added_to:
        return
    found = _gradients(optimizer)
    if found is None:
        _kept.pop(optimizer, None)
        return
    with torch.no_grad():
        before = _kept.get(optimizer, {})
        for key, gradient in found.items():
            known = before.get(key)
            if known is not None and known.copy.shape == gradient.shape and known.copy.dtype == gradient.dtype:
                known.copy.copy_(gradient)
                copy = known.copy
            else:
                copy = gradient.detach().clone()
            found[key] = _Kept(gradient, local_of(gradient)._version, copy)
    _kept[optimizer] = found


@contextmanager
def kept_for_now(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, the gradients belong to the state for the calling thread, and are not copied."""
    found = None if optimizer in _kept else _gradients(optimizer)
    if found is None:
        yield
        return
    _for_now.optimizer, _for_now.gradients = optimizer, {key: one.detach() for key, one in found.items()}
    try:
        yield
    finally:
        _for_now.optimizer, _for_now.gradients = None, {}


def note_dropped(optimizer: torch.optim.Optimizer) -> None:
    """The first backward after its step has found no gradients: nothing adds to them."""
    if optimizer in _read:
        return
    _added_to.discard(optimizer)
    _kept.pop(optimizer, None)


def _gradients(optimizer: torch.optim.Optimizer) -> dict[int, Any] | None:
    """Its gradients by the parameters' ids; None if one cannot be kept: it is sparse, or cut otherwise."""
    found: dict[int, Any] = {}
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        is_cut_alike = gradient.shape == parameter.shape and place_of(gradient) == place_of(parameter)
        if gradient.layout is not torch.strided or not is_cut_alike:
            return None
        found[id(parameter)] = gradient
    return found


def _has_changed(kept: _Kept) -> bool:
    return kept.gradient is None or local_of(kept.gradient)._version != kept.version


def of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Any:
    """The copy of one gradient; None if none is kept."""
    if _for_now.optimizer is optimizer:
        return _for_now.gradients.get(id(parameter))
    known = _kept.get(optimizer, {}).get(id(parameter)) if _kept else None
    return None if known is None else known.copy


def begin_load() -> None:
    """All state is about to be loaded: what is kept is of another boundary."""
    _kept.clear()


def load(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """One gradient was loaded; `put_back` puts it in its place.

    gradient  of the shape and dtype of the parameter; filled perhaps later
    """
    _added_to.add(optimizer)
    _kept.setdefault(optimizer, {})[id(parameter)] = _Kept(None, -1, gradient)


def put_back(optimizer: torch.optim.Optimizer) -> bool:
    """In a replacement: its gradients become those that are kept; returns whether any are."""
    kept = _kept.get(optimizer)
    if kept is None:
        return False
    for parameter in parameters_of(optimizer):
        known = kept.get(id(parameter))
        if known is None:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = known.copy.clone()
        else:
            local_of(parameter.grad).detach().copy_(local_of(known.copy))
        if known is not None:
            known.gradient, known.version = parameter.grad, local_of(parameter.grad)._version
    return True


def forget() -> None:
    """The run of the script is over."""
    _added_to.clear()
    _read.clear()
    _kept.clear()
