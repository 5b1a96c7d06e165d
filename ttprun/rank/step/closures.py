"""Closures: with one, forward pass, backward pass and collectives run inside `Optimizer.step`.

The weights change only after the closure has ended, so that moment is treated as the beginning of the step. Begin with
`watch`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ttprun.introspect import signal_handlers

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
