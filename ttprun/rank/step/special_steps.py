"""Steps that are not taken as they stand in the script: with a closure, left out by a GradScaler, in `join()`, or in a
replay.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ttprun.groups.process_group import groups_of
from ttprun.introspect import fail_open, signal_handlers
from ttprun.introspect.current_rank import current
from ttprun.protocol.reason import Reason

# Closures: with one, forward pass, backward pass and collectives run inside `Optimizer.step`.
#
# The weights change only after the closure has ended, so that moment is treated as the beginning of the step. Begin
# with `watch`.

_NAME = "closure"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ClosureWatch:
    """The closure of one step.

    ended    called with the result of the first call; its own result is returned to the optimizer
    again    called before each further call of the closure
    calls    number of calls so far
    """

    def __init__(self, ended: Callable[[Any], Any], again: Callable[[], None]) -> None:
        self._ended = ended
        self._again = again
        self.calls = 0

    def over(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The function that the optimizer gets instead of the closure."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls > 1:
                self._again()
                return signal_handlers.call_through(closure, args, kwargs)
            return self._ended(signal_handlers.call_through(closure, args, kwargs))

        return functools.wraps(closure, updated=())(signal_handlers.gate(run))


def watch(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], by: ClosureWatch
) -> Arguments | None:
    """The arguments of `Optimizer.step` with the closure watched.

    args, kwargs   of the call, the optimizer first
    by             notes the calls of the closure
    returns        both as they are to be used; None if they contain no closure
    """
    if callable(kwargs.get(_NAME)):
        return args, kwargs | {_NAME: by.over(kwargs[_NAME])}
    if len(args) > 1 and callable(args[1]) and _is_closure(optimizer, args[1]):
        return (args[0], by.over(args[1]), *args[2:]), kwargs
    return None


def _is_closure(optimizer: torch.optim.Optimizer, value: Any) -> bool:
    """Whether the first parameter of `step` is a closure; a script's own optimizer may take a model there."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    first = next((parameter for parameter in parameters[1:] or parameters), None)
    if first is None or first.kind is inspect.Parameter.VAR_POSITIONAL:  # it is passed on
        return not isinstance(value, torch.nn.Module)
    return first.name == _NAME


# GradScaler: what a step that it leaves out has reduced is kept; a replay leaves out the same steps, and no others.
#
# A scaler leaves a step out if a gradient has overflowed. The gradients of a replay are those of other weights: they
# say nothing of what the lost rank did. Its records do: it has a boundary where the scaler let the optimizer step.
# What the scaler keeps of the overflow until its `update` follows from that, or, if the optimizer itself leaves the
# step out (fused=True), is in the record. The scale itself is in the records, too.

_stepping: list[Any] = []  # scalers whose `step` is running


def wrap_step(original: Any) -> Any:
    """GradScaler.step: note that it runs."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        _stepping.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _stepping.pop()

    return step


def wrap_maybe_opt_step(original: Any) -> Any:
    """GradScaler._maybe_opt_step: keep what was reduced if no step is taken.

    In a replay step if the lost rank has, whether or not a gradient has overflowed.
    """

    def maybe_opt_step(self: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None and not session.mode.is_live:
            is_left_out = session.mode.leaves_step_out(fail_open.caller())
            for flag in () if is_left_out is None else state["found_inf_per_device"].values():
                flag.fill_(float(bool(is_left_out)))
        before = None if session is None else session.applied
        returned = original(self, optimizer, state, *args, **kwargs)
        if session is not None and session.applied == before:
            for group in groups_of(session):
                group.buckets.keep_results()
        return returned

    return maybe_opt_step


def wrap_update(original: Any) -> Any:
    """GradScaler.update: nothing, where the replay has skipped the loop in which the steps are taken."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = current()
        is_in_replay = session is not None and not session.mode.is_live and self.is_enabled()
        if is_in_replay and not any(state["found_inf_per_device"] for state in self._per_optimizer_states.values()):
            return None
        return original(self, *args, **kwargs)

    return update


def take_over(optimizer: torch.optim.Optimizer) -> None:
    """A record is restored, and with it the optimizer's `found_inf`: the running scaler has found the same."""
    found_inf = getattr(optimizer, "found_inf", None)
    if not _stepping or not isinstance(found_inf, torch.Tensor):
        return
    state = getattr(_stepping[-1], "_per_optimizer_states", {}).get(id(optimizer), {})
    for flag in state.get("found_inf_per_device", {}).values():
        flag.copy_(found_inf.reshape(flag.shape))


def wrap_join(original: Any) -> Any:
    """Join.__enter__, called by DistributedDataParallel.join: a rank that runs out of data stops stepping."""

    def enter(self: Any) -> Any:
        session = current()
        if session is not None and self._enable and session.world_size > 1:
            session.give_up_protection(
                Reason(
                    "unequal-steps",
                    "with join() the ranks take different numbers of steps: give each as many batches (a "
                    "DistributedSampler, drop_last=True)",
                )
            )
        return original(self)

    return enter


# The step at whose end a replay goes live. torch calls the optimizer's own hooks first, and then the global ones, as
# the values of a dictionary. What the script's hooks print or send there, the lost rank may not have: they run live.

_HOOKS_BEHIND = "_optimizer_step_post_hooks"


def call_before_others(optimizer: torch.optim.Optimizer, after_step: Any) -> None:
    """Call our hook behind this step, and behind no other, before the script's own ones."""
    theirs = getattr(optimizer, _HOOKS_BEHIND)

    def first(*args: Any) -> None:
        setattr(optimizer, _HOOKS_BEHIND, theirs)
        after_step(*args)

    setattr(optimizer, _HOOKS_BEHIND, SimpleNamespace(values=lambda: [first, *theirs.values()]))
