"""Notice a script that carries gradients across a step.

Gradients at a boundary are not recorded, since nearly every script zeroes them before it uses them again. In the first
steps the gradients of each optimizer are watched, later one of them in turn: if the next backward adds to what the
script has left of it, scaled or replaced by another tensor perhaps, its optimizer's gradients are kept from then on
(kept_gradients.py), or the script is refused. After a replay those that are not kept are made NaN; if NaN is
left when a backward adds to them, or when their optimizer steps for the first time, the script has added to gradients
that are lost (`poison`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ttprun.introspect.distributed_tensors import local_of
from ttprun.introspect.models import shown_to
from ttprun.introspect.tensor_bytes import elements_of
from ttprun.introspect.unseen import unseen
from ttprun.tensors import open_boundaries
from ttprun.tensors.optimizer_registry import parameters_of
from ttprun.tensors.sharded import are_cut_alike

# Gradients that a backward adds to after the step that has used them: they are state, and kept like it.
#
# Nearly every script zeroes gradients before it uses them again, so they are not recorded. In two kinds of scripts a
# backward adds to old ones: a GAN's generator learns through the discriminator, whose are zeroed afterwards; and
# some scripts never call zero_grad(). The first steps show whose gradients these are (`gradients.watch`). Others read
# them after the step, for a log of their norm: their code shows it (`note_read`). They are copied after each step of
# their optimizer. For as long as nothing else has changed them, the copies belong to the optimizer's state
# (`replicated.rows`), and reach mirrors, snapshots, checkpoints and replacements with it.


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
        is_cut_alike = gradient.shape == parameter.shape and are_cut_alike(gradient, parameter)
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


def forget_kept() -> None:
    """The run of the script is over."""
    _added_to.clear()
    _read.clear()
    _kept.clear()


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
        self.is_new = not is_added_to(optimizer)
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
            note_dropped(optimizer)
        self.is_carried = bool(self._found)

    def look_after_backward(self) -> bool:
        """Backward passes have ended: if one has added to them, the optimizer's gradients are kept from its next step.

        returns   whether that is seen now for the first time, and not in one of the optimizer's first steps
        """
        optimizer = self.optimizer()
        if optimizer is None or is_added_to(optimizer) or not self.is_added_to():
            return False
        note_added_to(optimizer)
        return not self.is_full

    def is_added_to(self) -> bool:
        """Whether a backward has added to one of them."""
        return any(one.is_added_to() for one in self._found)


_watched: list[_Watched] = []
_steps_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def _in_turn(optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """One of its parameters, another one after each step; mostly none on a device, which is to be waited for."""
    groups = [group["params"] for group in optimizer.param_groups]
    if not (count := sum(map(len, groups))):
        return []
    at = steps % count
    for in_group in groups:
        if at < len(in_group):
            break
        at -= len(in_group)
    found = in_group[at]
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
        note_read(optimizer)
    for one in _watched:
        one.look_after_backward()
    note_step(optimizer)
    open_boundaries.note_step(optimizer)
    steps = _steps_watched.get(optimizer, 0)
    _steps_watched[optimizer] = steps + 1
    _watched[:] = [one for one in _watched if one.optimizer() not in (None, optimizer)]
    if steps < _STEPS_WATCHED or not is_added_to(optimizer):
        _watched.append(_Watched(optimizer, steps))


@unseen
def look_at_watched() -> None:
    """A backward begins."""
    open_boundaries.note_backward()
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
    return kept_for_now(optimizer) if is_unknown else nullcontext()


def were_carried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is about to step has gradients of its last step in those of this one, unkept."""
    mine = [one for one in _watched if one.optimizer() is optimizer]
    for one in mine:
        one.look_after_backward()
    if mine:
        _watched[:] = [one for one in _watched if one not in mine]
    return any(not one.is_new and one.is_added_to() for one in mine) and not is_kept(optimizer)


def poison(optimizers: list[torch.optim.Optimizer], refuse: Callable[[], None] = lambda: None) -> None:
    """The replay is over: its gradients become NaN, but for those that are kept.

    refuse   called in the backward pass that adds to one of them, before it is reduced: a GradScaler would only leave
             out the step, in all ranks
    """
    for optimizer in optimizers:
        if put_back(optimizer):
            continue
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                elements_of(local_of(parameter.grad).detach()).fill_(float("nan"))
                _begun_anew.discard(id(parameter))  # that of another parameter, which has died
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
    forget_kept()
    open_boundaries.forget_backwards()


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
