"""Handlers of signals, the script's and those of libraries, do not run inside our code.

Python runs a handler between two bytecodes of the main thread, wherever that is, and what the handler raises surfaces
there: torch reports a dead DataLoader worker in its handler of SIGCHLD, and `signal.alarm` limits the time of what the
script calls. In the middle of our code that would leave our state half changed, and look like an error of ours. So each
handler is wrapped: a signal that comes while our code runs waits for its end, and its handler is called before the
script continues. Waiting for a collective is part of that: under torchrun it is C++ code, in which Python calls no
handler either. So is `Optimizer.step`, once it changes weights.

Where the main thread is, its stack tells when a signal comes. A call of ours costs one look at `waiting` at its end.

    gate     a function of ours that the script enters; handlers that wait are called when it returns
    through  a function that runs the script's code, or a library's on its behalf, inside a gate

`signal.getsignal` returns what the script has set. Standard library only. Begin with `Wrapped`.
"""

from __future__ import annotations

import _thread
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_set_handler, _handler_of = signal.signal, signal.getsignal
_trip: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]  # its stub knows no number
waiting: set[int] = set()  # signals that have come while our code ran
_gates: set[CodeType] = set()
_through: set[CodeType] = set()


class Now:
    """What the main thread's stack does not tell.

    around_steps   torch's wrapper of Optimizer.step
    is_stepping    the step under way has begun to change weights
    is_ending      whether the job is being ended: then handlers run at once, for what we wait for may never come
    is_in_engine   whether autograd's engine goes backward on this thread
    in_c           where C++ that has called our code was called: (id of the frame, its instruction)
    """

    around_steps: CodeType | None = None
    is_stepping = False
    is_ending: Callable[[], bool] = lambda: False
    is_in_engine: Callable[[], bool] = lambda: False
    in_c = (0, 0)


class Interrupted(Enum):
    """Where a signal finds the main thread."""

    SCRIPT = 1
    GATE = 2
    STEP = 3
    C = 4


class Wrapped:
    """What Python calls in the place of a handler."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        waiting.add(number)  # at first, for another handler may end this function with an exception
        place = _place_of(frame)
        if place is Interrupted.SCRIPT or Now.is_ending():
            waiting.discard(number)
            Now.in_c = (0, 0)
            return self.handler(number, frame)
        if place is not Interrupted.GATE:
            _come_again()
        return None


def wrapped(handler: Any) -> Any:
    """What to set in the place of a handler; what is none (SIG_DFL, SIG_IGN) stays."""
    # asyncio's does nothing: its event loop reads the signals from a descriptor.
    is_of_asyncio = isinstance(handler, FunctionType) and handler.__module__ == "asyncio.unix_events"
    return Wrapped(handler) if callable(handler) and not (isinstance(handler, Wrapped) or is_of_asyncio) else handler


def unwrapped(handler: Any) -> Any:
    """The handler that the script has set, given what is set."""
    return handler.handler if isinstance(handler, Wrapped) else handler


def wrap_all(but: Callable[..., Any]) -> None:
    """Wrap the handlers that are set now, but for this one; main thread only."""
    for number in signal.valid_signals():
        handler = _handler_of(number)
        if callable(handler) and handler is not but:
            _set_handler(number, wrapped(handler))


def unwrap_all() -> None:
    """In a forked child: none of our code runs here."""
    waiting.clear()
    for number in signal.valid_signals():
        if isinstance(handler := _handler_of(number), Wrapped):
            _set_handler(number, handler.handler)


def is_gate(function: F) -> F:
    """Mark a function as a gate: its last act is `if waiting: leave()`."""
    _gates.add(function.__code__)
    return function


def leads_through(function: F) -> F:
    """Mark a function that does nothing but run the script's code inside the gate that has called it."""
    _through.add(function.__code__)
    return function


def gate(function: F) -> F:
    """Make a function a gate."""
    gated: F = _gate(function, False)
    return gated


def gate_from_c(function: F) -> F:
    """Make a function that C code calls a gate: it could not pass on an exception of a handler."""
    gated: F = _gate(function, True)
    return gated


def _gate(function: Any, is_from_c: bool) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except BaseException:
            if waiting:
                leave(is_from_c=True)
            raise
        if waiting:
            leave(is_from_c)
        return result

    return is_gate(call)


@leads_through
def call_through(original: Callable[..., T], args: Iterable[Any], kwargs: Mapping[str, Any]) -> T:
    """Call what is the script's, or a library's, from inside a gate; signals that came meanwhile reach it first.

    args, kwargs   of the original
    """
    if waiting:
        deliver()
    return original(*args, **kwargs)


def leave(is_from_c: bool = False) -> None:
    """The last act of a gate: call the handlers that wait, unless an outer gate will.

    is_from_c   C code may have called the gate: Python calls the handlers itself as soon as it runs the script again
    """
    if threading.current_thread() is not threading.main_thread():
        return
    frame = sys._getframe(1).f_back
    place = _place_of(frame)
    if place is Interrupted.GATE:
        return
    if is_from_c or place is not Interrupted.SCRIPT:
        outside = _frame_of_script(frame)
        Now.in_c = (0, 0) if outside is None else (id(outside), outside.f_lasti)
        _come_again()
    else:
        _deliver(frame)


def deliver() -> None:
    """The first act of a function that leads through a gate: call the handlers that wait."""
    _deliver(sys._getframe(1))


def _deliver(frame: FrameType | None) -> None:
    if threading.current_thread() is not threading.main_thread() or _place_of(frame) is not Interrupted.SCRIPT:
        return
    while waiting:
        number = min(waiting)
        waiting.discard(number)
        handler = unwrapped(_handler_of(number))
        if callable(handler):
            _call(handler, number, _frame_of_script(frame) or frame)


@leads_through
def _call(handler: Any, number: int, frame: FrameType | None) -> None:
    handler(number, frame)


def _come_again() -> None:
    """Have Python call the handlers that wait as soon as this function's callers, all of them ours, have returned.

    Python looks for signals after a call, at a function's beginning and at a jump backwards. The last line is none of
    these, nor is anything that its callers do after it. A descriptor that the signals are written to, too (asyncio's),
    is not to get them twice.
    """
    for number in [*waiting]:
        if not isinstance(_handler_of(number), Wrapped):  # the script has taken its handler away
            waiting.discard(number)
    descriptor = signal.set_wakeup_fd(-1)
    again = map(_trip, waiting)
    restore = functools.partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
    then = map(restore, (descriptor,) if descriptor >= 0 else ())
    _ = [*again, *then]


def _place_of(frame: FrameType | None) -> Interrupted:
    outside = _frame_of_script(frame)
    passed = 0  # functions that lead through a gate further out
    while frame is not None:
        code = frame.f_code
        if code in _gates:
            if not passed:
                return Interrupted.GATE
            passed -= 1
        elif code in _through:
            passed += 1
        elif code is Now.around_steps and Now.is_stepping and not passed:
            return Interrupted.STEP
        frame = frame.f_back
    return Interrupted.C if outside is not None and _is_in_c(outside) else Interrupted.SCRIPT


def _is_in_c(frame: FrameType) -> bool:
    """Whether this frame has called C++ that must not meet an exception of a handler: DDP's reducer, mostly.

    Some functions of Python's C interface call handlers, e.g. `PyObject_Str`, which torch calls for a group of ours.
    """
    if (id(frame), frame.f_lasti) == Now.in_c:
        return True
    return frame.f_code.co_name == "_engine_run_backward" and Now.is_in_engine()


def _frame_of_script(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


_CALLING = {Wrapped.__call__.__code__, _call.__code__}


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler has raised this: its traceback goes through our call of it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in _CALLING:
        trace = trace.tb_next
    return trace is not None
