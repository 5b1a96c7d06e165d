"""Keep our own exceptions out of the user's calls.

Every function that we replace goes through `guard`. If ours raises before it has called the original, the original is
called with the user's arguments; if it raises afterwards, the original's result is returned. Protection is off from
then on, the reason is reported once, and training continues as under torchrun. Exceptions of the original pass
untouched, and so do ours that are meant for the script: an injected fault, the end of the job.

In a replay, an exception of ours refuses the replay, and the agent takes a lower rung.

Standard library only. Begin with `guard`.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from ttprun.introspect import current_rank
from ttprun.introspect.signal_handlers import call_through, gate, is_gate, is_of_handler, leave, waiting

_E = TypeVar("_E", bound=BaseException)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _Call:
    """One call of a function of ours, and the outcome of the original's call inside it.

    owner      the function's name, as in the table of patches
    returned   (result,) once the original has returned
    raised     the original's exception
    """

    owner: str
    returned: tuple[Any, ...] = ()
    raised: BaseException | None = None


class _Newest(threading.local):
    call: _Call | None = None


_newest = _Newest()


def meant(error: _E) -> _E:
    """Mark an exception as meant for the script, so that it passes. A class may set is_meant_for_script instead."""
    error.is_meant_for_script = True  # type: ignore[attr-defined]
    return error


def guard(name: str, original: Any, wrap: Callable[[Any], Any]) -> Any:
    """Our replacement of the original, guarded.

    name      of the replaced function, for reports
    wrap      given the original, returns ours
    """

    def noted(*args: Any, **kwargs: Any) -> Any:
        return call_original(name, call_through, original, args, kwargs)

    ours = wrap(noted)

    @is_gate
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            result = run(name, ours, original, args, kwargs)
        except BaseException:
            if waiting:
                leave(is_from_c=True)
            raise
        if waiting:
            leave()
        return result

    return guarded if hasattr(original, "__get__") else LikeBuiltin(guarded, original)


class LikeBuiltin:
    """Calls ours in the place of a function in C, which does not become a method as a class's attribute.

    `logging.Formatter.converter = time.localtime` relies on that. Pickled by name, as the original is.
    """

    def __init__(self, ours: Callable[..., Any], original: Any) -> None:
        self._ours = ours
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ours(*args, **kwargs)

    # Of no kind that `inspect` knows: where the original has no signature, `getfullargspec` takes none from here.
    __call__.__signature__ = ()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return repr(self._original)

    @property
    def __signature__(self) -> Any:
        """For `inspect.getfullargspec`, which does not ask what is wrapped. AttributeError if the original has none."""
        import inspect  # a script may look at files before it has imported that

        try:
            return inspect.signature(self._original)
        except ValueError as error:
            raise AttributeError(str(error)) from None

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        module = "os" if self._original.__module__ == "posix" else self._original.__module__
        return pkgutil.resolve_name, (f"{module}:{self._original.__qualname__}",)


def call_original(owner: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Called by ours: call the original, and note its outcome in the newest call of this owner.

    owner   as ours was given it by `run`; calls of others are only passed on
    """
    call = _newest.call
    if call is None or call.owner != owner:
        return original(*args, **kwargs)
    _newest.call = None  # calls inside the original are not this one
    try:
        result = original(*args, **kwargs)
    except BaseException as error:
        call.raised = error
        raise
    finally:
        _newest.call = call
    call.raised, call.returned = None, (result,)
    return result


def run(owner: str, ours: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ours; if it fails, return or raise what the original does. The caller is a gate (signal_handlers.py).

    owner          names the call, in the report of a failure and in `call_original`
    ours           a wrapper that calls the original by `call_original`, or not at all
    original       called here if ours has failed before it has
    args, kwargs   of both

    Raises what the original raises, and what of ours is meant for the script (`is_meant`).
    """
    outer = _newest.call
    call = _newest.call = _Call()  # without a constructor: this is done in each call that the script makes of ours
    call.owner = owner
    try:
        return ours(*args, **kwargs)
    except Exception as error:
        if error is call.raised or is_meant(error):
            raise
        give_up(owner, error)
    finally:
        _newest.call = outer
    if call.returned:
        return call.returned[0]
    if call.raised is not None:
        raise call.raised
    return call_through(original, args, kwargs)


def hook(name: str, ours: Any) -> Any:
    """Guard a function of ours that replaces nothing, such as a global optimizer hook."""

    def guarded(*args: Any) -> Any:
        return run(name, ours, _nothing, args, {})

    return gate(guarded)


def _nothing(*args: Any) -> None:
    pass


def caller() -> FrameType:
    """The frame that called this function's caller, skipping those of this file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame or sys._getframe(1)  # C code calls our function while the interpreter ends


def give_up(where: str, error: BaseException) -> None:
    """Switch protection off after an error of ours. In a replay: raises what ends it.

    where   ours that has failed, for the reason
    """
    session = session_now()
    if session is None:
        return
    reason = f"ttprun failed in {where}: {error!r}{_place_of(error)}; training continues as under torchrun"
    session.note_failure(reason, threading.current_thread() is threading.main_thread())


def is_meant(error: BaseException) -> bool:
    """Whether an exception of ours is meant for the script, or for its framework's callbacks.

    A device's error is: whoever asks the device for something next gets it. So is what a signal handler has raised.
    """
    if getattr(error, "is_meant_for_script", False) or is_of_handler(error):
        return True
    session = session_now()
    if session is None:
        return False
    # A framework answers errors by its own callbacks.
    return session.framework is not None or session.diagnose(error).is_of_computation


def raise_if_meant(error: BaseException) -> None:
    """Raise an exception again that is meant for the script: a device's, which one of our own operations has met."""
    if is_meant(error):
        raise error


def session_now() -> Any:
    """This process's host; None if it has none."""
    return current_rank.current()


def _place_of(error: BaseException) -> str:
    """The innermost line of ttprun in its traceback; "" if there is none."""
    place, trace = "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path.startswith(_HERE) and path != __file__:
            place = f" (ttprun{path[len(_HERE) :]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


class NotRepairableError(RuntimeError):
    """An optimizer holds something that another rank cannot load; the message names it."""
