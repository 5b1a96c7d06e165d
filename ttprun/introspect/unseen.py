"""Have torch report nothing of our own operations to the script.

A subclass of Tensor, a mode (a counter of operations, a profiler of memory), a tracer and the grad mode of the script
notice each operation on the thread that runs it. Ours are not the script's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

P = ParamSpec("P")
R = TypeVar("R")
_set_trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
_count_modes = torch._C._len_torch_dispatch_stack


class Unseen:
    """A context in which torch tells the script nothing; may be entered inside itself."""

    __slots__ = ("_functions", "_modes", "_trace")

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._modes: Any = None
        self._trace: Any = None
        if _count_modes():
            self._modes = dispatch._disable_current_modes()
            self._modes.__enter__()
        if torch._C._get_tracing_state() is not None:
            self._trace = torch._C._get_tracing_state()
            _set_trace(None)

    def __exit__(self, *raised: Any) -> None:
        if self._trace is not None:
            _set_trace(self._trace)
        if self._modes is not None:
            self._modes.__exit__(*raised)
        self._functions.__exit__(*raised)


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function's operations are unseen. It must not call code of the script's."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with Unseen():
            return function(*args, **kwargs)

    return call
