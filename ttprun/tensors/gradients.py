"""What is known of each optimizer's gradients, and what is kept of them.

Gradients at a boundary are not recorded, since nearly every script zeroes them before it uses them again. In two kinds
of scripts a backward adds to old ones: a GAN's generator learns through the discriminator, whose are zeroed afterwards;
and some scripts never call zero_grad(). Others read them after the step, for a log of their norm: their code shows it.
So the gradients of each optimizer are watched, in its first steps all of them, later one in turn: if the next backward
adds to what the script has left, scaled or replaced by another tensor perhaps, they are carried. From then on they are
copied after each step of their optimizer. For as long as nothing else has changed them, the copies belong to its state
(`replicated.rows`), and reach mirrors, snapshots, checkpoints and replacements with it.

After a replay those that are not kept are made NaN; if NaN is left when a backward adds to them, or when their
optimizer steps for the first time, the script has added to gradients that are lost (`poison`).

One table has a row for each optimizer: read `Gradients` first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ttprun.introspect.model_tensors import local_of, shown_to
from ttprun.introspect.tensor_bytes import elements_of, unseen
from ttprun.protocol.reason import Reason
from ttprun.tensors.optimizer_registry import optimizers, parameters_of
from ttprun.tensors.sharded import are_cut_alike

GRADIENT = "ttprun.gradient"  # name among a parameter's state
CARRIED = Reason(
    "gradients-carried",
    "the script carries gradients across an optimizer step, and a replacement would not have them: call zero_grad() in "
    "each step",
)
CARRIED_NOW = Reason(
    "gradients-carried",
    "the script has begun to carry gradients across an optimizer step, and a replacement would not have those of this "
    "step; from the next step on they are kept",
)
_STEPS_WATCHED = 3  # in full, of each optimizer
_LOOKS_ON_DEVICE = 16  # steps from one to the next
_MOST_ELEMENTS = 4096  # of a gradient that are looked at


_MANY = 8  # backward passes before an optimizer is made: more than a set-up takes
_passes = 0  # backward passes so far, up to _MANY
_NOTHING = Reason()
NO_OPTIMIZER = Reason("no-step-yet", f"{_MANY} backward passes, and the script has made no optimizer of torch")


class Gradients:
    """What is known of one optimizer's gradients.

    steps       after which they were watched
    watched     since its newest step: what the script does to them; None: they are not watched
    is_carried  a backward adds to what its step has used, or the script reads that: they are kept from its next step on
    is_read     the script reads them between its step and the next backward
    kept        those of the newest boundary, by the parameters' ids; None: they are not kept
    awaited     after a replay, of the parameters (ids) that it has not stepped since: whether a backward has begun the
                gradient anew, and NaN in it is the script's own
    shared      what open_boundaries.py has seen of backward passes that it shares with others; None: nothing yet
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        key = id(optimizer)
        self.optimizer = weakref.ref(optimizer, lambda _: _table.pop(key, None))
        self.steps = 0
        self.watched: _Watched | None = None
        self.is_carried = self.is_read = False
        self.kept: dict[int, _Kept] | None = None
        self.awaited: dict[int, bool] = {}
        self.shared: Any = None

    def drop(self) -> None:
        """The first backward after its step has found no gradients: nothing adds to them."""
        if not self.is_read:
            self.is_carried, self.kept = False, None

    def begin_to_carry(self) -> bool:
        """Backward passes have ended: if one has added to them, they are kept from the next step on.

        returns   whether that is seen now for the first time, and not in one of the optimizer's first steps
        """
        if self.is_carried or self.watched is None or not self.watched.is_added_to():
            return False
        self.is_carried = True
        return not self.watched.is_full


_table: dict[int, Gradients] = {}  # by the optimizer's id; it leaves with the optimizer


def of_optimizer(optimizer: torch.optim.Optimizer) -> Gradients:
    """Its row of the table, which is made if there is none."""
    return _table.get(id(optimizer)) or _table.setdefault(id(optimizer), Gradients(optimizer))


def forget() -> None:
    """The run of the script is over."""
    _table.clear()


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

    def has_changed(self) -> bool:
        """Whether the gradient is not what the step has left."""
        return self.gradient is None or local_of(self.gradient)._version != self.version


class _ForNow(threading.local):
    """What one thread takes for kept, while the mirror's thread may look at the state as well."""

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self.gradients: dict[int, Any] = {}


_for_now = _ForNow()


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer has taken its step. Gradients of others that have changed since theirs are dropped."""
    _keep(optimizer, of_optimizer(optimizer))


def _keep(optimizer: torch.optim.Optimizer, mine: Gradients) -> None:
    for row in (*_table.values(),):
        if row is not mine and row.kept is not None and any(entry.has_changed() for entry in row.kept.values()):
            row.kept = None
    gradients = _gradients(optimizer) if mine.is_carried else None
    if gradients is None:
        mine.kept = None
        return
    before, kept = mine.kept or {}, {}
    with torch.no_grad():
        for key, gradient in gradients.items():
            old = before.get(key)
            is_of_form = old is not None and (old.copy.shape, old.copy.dtype) == (gradient.shape, gradient.dtype)
            copy = old.copy.copy_(gradient) if old is not None and is_of_form else gradient.detach().clone()
            kept[key] = _Kept(gradient, local_of(gradient)._version, copy)
    mine.kept = kept  # at once: the mirror's thread may look


@contextmanager
def kept_for_now(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, the gradients belong to the state for the calling thread, and are not copied."""
    gradients = _gradients(optimizer) if of_optimizer(optimizer).kept is None else None
    if gradients is None:
        yield
        return
    _for_now.optimizer, _for_now.gradients = optimizer, {key: gradient.detach() for key, gradient in gradients.items()}
    try:
        yield
    finally:
        _for_now.optimizer, _for_now.gradients = None, {}


def _gradients(optimizer: torch.optim.Optimizer) -> dict[int, Any] | None:
    """Its gradients by the parameters' ids; None if one cannot be kept: it is sparse, or cut otherwise."""
    gradients: dict[int, Any] = {}
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        is_cut_alike = gradient.shape == parameter.shape and are_cut_alike(gradient, parameter)
        if gradient.layout is not torch.strided or not is_cut_alike:
            return None
        gradients[id(parameter)] = gradient
    return gradients


def kept_of(optimizer: torch.optim.Optimizer) -> Mapping[int, Any]:
    """The copies of its gradients that are kept, by the parameters' ids."""
    if _for_now.optimizer is optimizer:
        return _for_now.gradients
    return {key: entry.copy for key, entry in (of_optimizer(optimizer).kept or {}).items()}


def begin_load() -> None:
    """All state is about to be loaded: what is kept is of another boundary."""
    for row in (*_table.values(),):
        row.kept = None


def load(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """One gradient was loaded; `put_back` puts it in its place.

    gradient  of the shape and dtype of the parameter; filled perhaps later
    """
    row = of_optimizer(optimizer)
    row.is_carried, row.kept = True, row.kept or {}
    row.kept[id(parameter)] = _Kept(None, -1, gradient)


def put_back(optimizer: torch.optim.Optimizer) -> bool:
    """In a replacement: its gradients become those that are kept; returns whether any are."""
    kept = of_optimizer(optimizer).kept
    if kept is None:
        return False
    for parameter in parameters_of(optimizer):
        mine = kept.get(id(parameter))
        if mine is None:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = mine.copy.clone()
        else:
            local_of(parameter.grad).detach().copy_(local_of(mine.copy))
        mine.gradient, mine.version = parameter.grad, local_of(parameter.grad)._version
    return True


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
    is_left      whether a backward has found one that is not zero, and no later one has found all zeroed; None: none
                 has run yet
    """

    def __init__(self, optimizer: torch.optim.Optimizer, row: Gradients) -> None:
        self.is_left: bool | None = None
        self.is_new = not row.is_carried
        self.is_full = row.steps < _STEPS_WATCHED
        shown = list(shown_to(optimizer)) if self.is_full else _in_turn(optimizer, row.steps)
        self.parameters = [parameter for parameter in shown if parameter.grad is not None]
        self._found: list[_Found] = []

    def look(self, row: Gradients) -> None:
        """A backward is about to add gradients."""
        if self.is_left is False:
            return
        was_unknown, self._found = self.is_left is None, []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and (_is_any(gradient) or (was_unknown and _is_scaled_to_zero(gradient))):
                self._found.append(_Found(parameter, weakref.ref(gradient), local_of(gradient)._version))
        if was_unknown and not self._found and self.is_full and self.parameters:
            row.drop()
        self.is_left = bool(self._found)

    def is_added_to(self) -> bool:
        """Whether a backward has added to one of them."""
        return any(gradient.is_added_to() for gradient in self._found)


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
    parameter = in_group[at]
    return [parameter] if parameter.is_cpu or steps % _LOOKS_ON_DEVICE == 0 else []


def _sampled(gradient: torch.Tensor) -> torch.Tensor:
    """Its elements, or some of a large one, from its beginning to its end."""
    elements = elements_of(local_of(gradient).detach())
    if elements.numel() <= _MOST_ELEMENTS or not elements.is_contiguous():
        return elements
    return elements.view(-1)[:: -(-elements.numel() // _MOST_ELEMENTS)]


def _is_any(gradient: torch.Tensor) -> bool:
    """Whether an element is not zero."""
    return bool(_sampled(gradient).any())


def _is_scaled_to_zero(gradient: torch.Tensor) -> bool:
    """Whether a gradient of zeros was multiplied by zero: of what is set to zero no element is negative."""
    sample = _sampled(gradient)
    return sample.is_floating_point() and bool(sample.signbit().any())


def watch(optimizer: torch.optim.Optimizer, are_read: Callable[[], bool] = lambda: False) -> None:
    """The optimizer has taken a step: watch what becomes of its gradients.

    are_read   whether the script may read gradients before the next backward; asked at its first step
    """
    row = of_optimizer(optimizer)
    if not row.steps and are_read():
        row.is_read = row.is_carried = True
    for other in (*_table.values(),):
        other.begin_to_carry()
    _keep(optimizer, row)
    if row.shared is not None:
        row.shared.note_step(optimizer)
    is_watched = row.steps < _STEPS_WATCHED or not row.is_carried
    row.watched = _Watched(optimizer, row) if is_watched else None
    row.steps += 1


@unseen
def look_at_watched() -> Reason:
    """A backward begins; returns, once, why it seems to be of a training whose steps nobody sees, "" else."""
    global _passes
    for row in (*_table.values(),):
        if row.shared is not None:
            row.shared.note_backward()
        if row.watched is not None:
            row.watched.look(row)
    if _passes == _MANY:
        return _NOTHING
    _passes += 1
    return NO_OPTIMIZER if _passes == _MANY and not optimizers() else _NOTHING


@unseen
def look_after_backward() -> Reason:
    """A backward has ended; returns why a replacement could not begin before it, "" if it could.

    That is so in one step alone: from the next one on, what it adds to is kept.
    """
    is_new = [row.begin_to_carry() for row in (*_table.values(),)]
    return CARRIED_NOW if any(is_new) else Reason()


def kept_if_unknown(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """A snapshot of its newest step has its gradients, if no backward has shown yet whether the script adds to them."""
    watched = of_optimizer(optimizer).watched
    is_unknown = watched is not None and watched.is_left is None and watched.is_full
    return kept_for_now(optimizer) if is_unknown else nullcontext()


def were_carried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is about to step has gradients of its last step in those of this one, unkept."""
    row = of_optimizer(optimizer)
    row.begin_to_carry()
    watched, row.watched = row.watched, None
    is_carried = watched is not None and not watched.is_new and watched.is_added_to()
    return is_carried and row.kept is None


def poison(optimizers: list[torch.optim.Optimizer], refuse: Callable[[], None] = lambda: None) -> None:
    """The replay is over: its gradients become NaN, but for those that are kept.

    refuse   called in the backward pass that adds to one of them, before it is reduced: a GradScaler would only leave
             out the step, in all ranks
    """
    for optimizer in optimizers:
        if put_back(optimizer):
            continue
        awaited = of_optimizer(optimizer).awaited = dict.fromkeys(map(id, parameters_of(optimizer)), False)
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                elements_of(local_of(parameter.grad).detach()).fill_(float("nan"))
                _guard(parameter, awaited, refuse)


def _guard(parameter: torch.Tensor, awaited: dict[int, bool], refuse: Callable[[], None]) -> None:
    def before_adding(_: Any) -> None:
        handle.remove()
        gradient = parameter.grad
        if gradient is not None and bool(torch.isnan(elements_of(local_of(gradient).detach())).all()):
            refuse()
        else:
            awaited[id(parameter)] = True

    if parameter.requires_grad and parameter.is_leaf:  # no backward adds to the gradient of a view
        handle = parameter.register_hook(before_adding)  # type: ignore[no-untyped-call]


def are_carried_over(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is about to step has gradients of the replay; True at most once per parameter.

    NaN in a gradient that a backward has begun anew is the script's own.
    If gradients have overflowed, and it leaves the step out itself (fused=True with a GradScaler), the next one shows.
    """
    awaited = of_optimizer(optimizer).awaited
    found_inf = getattr(optimizer, "found_inf", None)
    if not awaited or (isinstance(found_inf, torch.Tensor) and bool(found_inf)):
        return False
    shown = [parameter for parameter in shown_to(optimizer) if id(parameter) in awaited]
    leftovers = [parameter.grad for parameter in shown if parameter.grad is not None and not awaited[id(parameter)]]
    for parameter in shown:
        awaited.pop(id(parameter), None)
    return any(bool(torch.isnan(elements_of(local_of(gradient))).any()) for gradient in leftovers)


def are_of_replay(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the input of a collective is made of gradients of the replay, whose optimizer has not stepped since.

    tensors   dense, any dtype, shape and device; a NaN in one of them is what shows it
    """
    is_awaited = any(row.awaited for row in (*_table.values(),))
    return is_awaited and any(bool(torch.isnan(elements_of(tensor)).any()) for tensor in tensors)
