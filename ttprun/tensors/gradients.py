"""Notice a script that carries gradients across a step.

Gradients at a boundary are not recorded, since nearly every script zeroes them before it uses them again. In the first
steps the gradients of each optimizer are watched, later one of them in turn: if the next backward adds to what the
script has left of it, scaled or replaced by another tensor perhaps, its optimizer's gradients are kept from then on
(kept_gradients.py), or the script is refused. After a replay those that are not kept are made NaN; if NaN is
left when a backward adds to them, or when their optimizer steps for the first time, the script has added to gradients
that are lost (`poison`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ttprun.introspect.distributed_tensors import local_of
from ttprun.introspect.parameter_groups import shown_to
from ttprun.introspect.tensor_bytes import elements_of
from ttprun.introspect.unseen import unseen
from ttprun.tensors import kept_gradients, shared_backwards
from ttprun.tensors.optimizer_registry import parameters_of

CARRIED = (
    "the script carries gradients across an optimizer step, and a replacement would not have them: call zero_grad() in "
    "each step"
)
CARRIED_NOW = (
    "the script has begun to carry gradients across an optimizer step, and a replacement would not have those of this "
    "step; from the next step on they are kept"
)
_STEPS_WATCHED = 3  # in full, of each optimizer
_LOOKS_ON_DEVICE = 16  # steps from one to the next
_MOST_ELEMENTS = 4096  # of a gradient that are looked at
# Of each optimizer, the parameters (ids) that it has not stepped since.
_poisoned: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()
_begun_anew: set[int] = set()  # ids of parameters whose gradient a backward has begun anew: NaN in it is its own


class _Found(NamedTuple):
    """A gradient that is not zero when a backward begins."""

    parameter: torch.Tensor
    gradient: weakref.ref[torch.Tensor]
    version: int

    def is_added_to(self) -> bool:
        """Whether it was written to, or another tensor has taken its place, and it is not zero."""
        now = self.parameter.grad
        is_other = now is not self.gradient() or (now is not None and local_of(now)._version != self.version)
        return is_other and now is not None and _is_any(now)


class _Watched:
    """Gradients of an optimizer, after its step: what the script does to them before the next backward is no matter.

    is_full      all are watched, as in the first steps; else one, another one after each step
    is_new       whether nothing was known of its optimizer's gradients then
    is_carried   whether a backward has found one that is not zero, and no later one has found all zeroed; None: none
                 has run yet
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.is_carried: bool | None = None
        self.is_new = not kept_gradients.is_added_to(optimizer)
        self.is_full = steps < _STEPS_WATCHED
        shown = list(shown_to(optimizer)) if self.is_full else _in_turn(optimizer, steps)
        self.parameters = [one for one in shown if one.grad is not None]
        self._found: list[_Found] = []

    def look(self) -> None:
        """A backward is about to add gradients."""
        if self.is_carried is False:
            return
        was_unknown, self._found = self.is_carried is None, []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and (_is_any(gradient) or (was_unknown and _is_scaled_to_zero(gradient))):
                self._found.append(_Found(parameter, weakref.ref(gradient), local_of(gradient)._version))
        optimizer = self.optimizer()
        if was_unknown and not self._found and self.is_full and self.parameters and optimizer is not None:
            kept_gradients.note_dropped(optimizer)
        self.is_carried = bool(self._found)

    def look_after_backward(self) -> bool:
        """Backward passes have ended: if one has added to them, the optimizer's gradients are kept from its next step.

        returns   whether that is seen now for the first time, and not in one of the optimizer's first steps
        """
        optimizer = self.optimizer()
        if optimizer is None or kept_gradients.is_added_to(optimizer) or not self.is_added_to():
            return False
        kept_gradients.note_added_to(optimizer)
        return not self.is_full

    def is_added_to(self) -> bool:
        """Whether a backward has added to one of them."""
        return any(one.is_added_to() for one in self._found)


_watched: list[_Watched] = []
_steps_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def _in_turn(optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """One of its parameters, another one after each step; mostly none on a device, which is to be waited for."""
    if not (count := sum(len(group["params"]) for group in optimizer.param_groups)):
        return []
    found = next(itertools.islice(shown_to(optimizer), steps % count, None))
    return [found] if found.is_cpu or steps % _LOOKS_ON_DEVICE == 0 else []


def _sampled(gradient: torch.Tensor) -> torch.Tensor:
    """Its elements, or some of a large one, from its beginning to its end."""
    found = elements_of(local_of(gradient).detach())
    if found.numel() <= _MOST_ELEMENTS or not found.is_contiguous():
        return found
    return found.view(-1)[:: -(-found.numel() // _MOST_ELEMENTS)]


def _is_any(gradient: torch.Tensor) -> bool:
    """Whether an element is not zero."""
    return bool(_sampled(gradient).any())


def _is_scaled_to_zero(gradient: torch.Tensor) -> bool:
    """Whether a gradient of zeros was multiplied by zero: of what is set to zero no element is negative."""
    found = _sampled(gradient)
    return found.is_floating_point() and bool(found.signbit().any())


def watch(optimizer: torch.optim.Optimizer, are_read: Callable[[], bool] = lambda: False) -> None:
    """The optimizer has taken a step: in its first ones, watch what becomes of a gradient.

    are_read   whether the script may read gradients before the next backward; asked at its first step
    """
    if optimizer not in _steps_watched and are_read():
        kept_gradients.note_read(optimizer)
    for one in _watched:
        one.look_after_backward()
    kept_gradients.note_step(optimizer)
    shared_backwards.note_step(optimizer)
    steps = _steps_watched.get(optimizer, 0)
    _steps_watched[optimizer] = steps + 1
    _watched[:] = [one for one in _watched if one.optimizer() not in (None, optimizer)]
    if steps < _STEPS_WATCHED or not kept_gradients.is_added_to(optimizer):
        _watched.append(_Watched(optimizer, steps))


@unseen
def look_at_watched() -> None:
    """A backward begins."""
    shared_backwards.note_backward()
    for one in _watched:
        one.look()


@unseen
def look_after_backward() -> str:
    """A backward has ended; returns why a replacement could not begin before it, "" if it could.

    That is so in one step alone: from the next one on, what it adds to is kept.
    """
    is_new = [one.look_after_backward() for one in _watched]
    return CARRIED_NOW if any(is_new) else ""


def kept_if_unknown(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """A snapshot of its newest step has its gradients, if no backward has shown yet whether the script adds to them."""
    is_unknown = any(one.is_carried is None and one.is_full for one in _watched if one.optimizer() is optimizer)
    return kept_gradients.kept_for_now(optimizer) if is_unknown else nullcontext()


def were_carried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is about to step has gradients of its last step in those of this one, unkept."""
    mine = [one for one in _watched if one.optimizer() is optimizer]
    for one in mine:
        one.look_after_backward()
    if mine:
        _watched[:] = [one for one in _watched if one not in mine]
    return any(not one.is_new and one.is_added_to() for one in mine) and not kept_gradients.is_kept(optimizer)


def poison(optimizers: list[torch.optim.Optimizer], refuse: Callable[[], None] = lambda: None) -> None:
    """The replay is over: its gradients become NaN, but for those that are kept.

    refuse   called in the backward pass that adds to one of them, before it is reduced: a GradScaler would only leave
             out the step, in all ranks
    """
    for optimizer in optimizers:
        if kept_gradients.put_back(optimizer):
            continue
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                elements_of(local_of(parameter.grad).detach()).fill_(float("nan"))
                _guard(parameter, refuse)
        _poisoned[optimizer] = set(map(id, parameters_of(optimizer)))


def _guard(parameter: torch.Tensor, refuse: Callable[[], None]) -> None:
    def before_adding(_: Any) -> None:
        handle.remove()
        held = parameter.grad
        if held is not None and bool(torch.isnan(elements_of(local_of(held).detach())).all()):
            refuse()
        else:
            _begun_anew.add(id(parameter))

    if parameter.requires_grad and parameter.is_leaf:  # no backward adds to the gradient of a view
        handle = parameter.register_hook(before_adding)  # type: ignore[no-untyped-call]


def forget() -> None:
    """The run of the script is over."""
    _poisoned.clear()
    _begun_anew.clear()
    _watched.clear()
    _steps_watched.clear()
    kept_gradients.forget()
    shared_backwards.forget()


def are_carried_over(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is about to step has gradients of the replay; True at most once per parameter.

    NaN in a gradient that a backward has begun anew is the script's own.
    If gradients have overflowed, and it leaves the step out itself (fused=True with a GradScaler), the next one shows.
    """
    left_over = _poisoned.get(optimizer)
    if left_over is None:
        return False
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, torch.Tensor) and bool(found_inf):
        return False
    shown = [one for one in shown_to(optimizer) if id(one) in left_over]
    left_over.difference_update(map(id, shown))
    if not left_over:
        del _poisoned[optimizer]
    left = [one.grad for one in shown if one.grad is not None and id(one) not in _begun_anew]
    _begun_anew.difference_update(map(id, shown))
    return any(bool(torch.isnan(elements_of(local_of(gradient))).any()) for gradient in left)


def are_of_replay(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the input of a collective is made of gradients of the replay, whose optimizer has not stepped since.

    tensors   dense, any dtype, shape and device; a NaN in one of them is what shows it
    """
    return bool(_poisoned) and any(bool(torch.isnan(elements_of(tensor)).any()) for tensor in tensors)
