"""Notice a script that carries gradients across a step.

Gradients at a boundary are not recorded, since nearly every script zeroes them before it uses them again. In the first
steps a gradient of each optimizer is watched: if the next backward adds to it, its optimizer's gradients are kept from
then on (kept_gradients.py), or the script is refused. After a replay those that are not kept are made NaN; if NaN is
left when a backward adds to them, or when their optimizer steps for the first time, the script has added to gradients
that are lost (`poison`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ttprun.rank.process.unseen import unseen
from ttprun.rank.weights import kept_gradients, shared_backwards
from ttprun.rank.weights.optimizer_registry import parameters_of
from ttprun.rank.weights.parameter_groups import shown_to
from ttprun.rank.weights.sharded import local_of
from ttprun.rank.weights.tensor_bytes import elements_of

CARRIED = (
    "the script carries gradients across an optimizer step, and a replacement would not have them: call zero_grad() in "
    "each step"
)
_STEPS_WATCHED = 3
# Of each optimizer, the parameters (ids) that it has not stepped since.
_poisoned: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()
_begun_anew: set[int] = set()  # ids of parameters whose gradient a backward has begun anew: NaN in it is its own


class _Watched:
    """One gradient of an optimizer, after its step.

    kept         its value then
    is_new       whether nothing was known of its optimizer's gradients then
    is_carried   whether a backward has found it unchanged, and no later one has found it zeroed; None: none has run yet
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.is_carried: bool | None = None
        self.is_new = not kept_gradients.is_added_to(optimizer)
        smallest_first = sorted(shown_to(optimizer), key=torch.Tensor.numel)
        self.parameter = next((one for one in smallest_first if _is_watchable(one.grad)), None)
        gradient = None if self.parameter is None else self.parameter.grad
        self.kept = None if gradient is None else local_of(gradient).detach().clone()

    def look(self) -> None:
        """A backward is about to add gradients."""
        gradient = None if self.parameter is None else self.parameter.grad
        if gradient is None or self.kept is None or not local_of(gradient).any():
            optimizer = self.optimizer()
            if self.is_carried is None and self.kept is not None and optimizer is not None:
                kept_gradients.note_dropped(optimizer)
            self.is_carried = False
        elif self.is_carried is None:
            self.is_carried = torch.equal(local_of(gradient), self.kept)

    def look_after_backward(self) -> None:
        """Backward passes have ended: if one has added to it, its optimizer's gradients are kept from now on."""
        optimizer, gradient = self.optimizer(), None if self.parameter is None else self.parameter.grad
        if not self.is_carried or optimizer is None or gradient is None or self.kept is None:
            return
        if not torch.equal(local_of(gradient), self.kept):
            kept_gradients.note_added_to(optimizer)


_watched: list[_Watched] = []
_steps_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def _is_watchable(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided and bool(local_of(gradient).any())


def watch(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer has taken a step: in its first ones, watch what becomes of a gradient."""
    for one in _watched:
        one.look_after_backward()
    kept_gradients.note_step(optimizer)
    shared_backwards.note_step(optimizer)
    steps = _steps_watched.get(optimizer, 0)
    if steps < _STEPS_WATCHED:
        _steps_watched[optimizer] = steps + 1
        _watched[:] = [one for one in _watched if one.optimizer() is not None]
        _watched.append(_Watched(optimizer))


@unseen
def look_at_watched() -> None:
    """A backward begins."""
    shared_backwards.note_backward()
    for one in _watched:
        one.look()


def kept_if_unknown(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """A snapshot of its newest step has its gradients, if no backward has shown yet whether the script adds to them."""
    is_unknown = any(one.is_carried is None for one in _watched if one.optimizer() is optimizer)
    return kept_gradients.kept_for_now(optimizer) if is_unknown else nullcontext()


def were_carried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is about to step has gradients of its last step in those of this one, unkept."""
    mine = [one for one in _watched if one.optimizer() is optimizer]
    for one in mine:
        one.look_after_backward()
    if mine:
        _watched[:] = [one for one in _watched if one not in mine]
    return any(one.is_carried and not one.is_new for one in mine) and not kept_gradients.is_kept(optimizer)


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
