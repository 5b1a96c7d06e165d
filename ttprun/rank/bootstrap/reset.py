"""Clear what a run of the script has left in its process (in Python, torch, its modules) before it is run again.

What cannot be undone, such as the settings of a library, is left to the replay: its checks find it if it matters, and
then a new process replaces the rank. Begin with `clear`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ttprun import frameworks
from ttprun.capture import installing
from ttprun.capture.effects import origins, output
from ttprun.capture.effects.effects import Effects
from ttprun.capture.position import user_code
from ttprun.device.device_errors import causes_of
from ttprun.groups import departure, thread_collectives
from ttprun.introspect import fail_open, model_tensors, random_state
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.ownership import has_muted_effects
from ttprun.rank.step import step_hooks
from ttprun.rank.verification import Verifier
from ttprun.tensors import gradients, open_boundaries, optimizer_registry

LIMIT_S = 1.0  # of each wait


def close(session: Rank) -> None:
    """End this rank's native threads and connections, after the script's own exit handlers.

    Mostly takes a millisecond. Operations that the script has not waited for get LIMIT_S to finish, and are then cut;
    what does not end then either is left running.
    """
    if session.recovery is not None:
        session.recovery.retire()
        session.recovery.join(LIMIT_S)
    output.end()
    session[Verifier].end(LIMIT_S)
    departure.end(session, LIMIT_S)


@dataclass
class Beginning:
    """The process's state when the script had just imported torch.

    handlers   of loggers by name, the root's by ""
    """

    directory: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    path: list[str] = field(default_factory=lambda: list(sys.path))
    streams: tuple[Any, Any] = field(default_factory=lambda: (sys.stdout, sys.stderr))
    excepthook: Any = field(default_factory=lambda: sys.excepthook)
    random: random_state.RngState = field(default_factory=random_state.capture)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    signals: dict[int, Any] = field(
        default_factory=lambda: {number: signal.getsignal(number) for number in signal.valid_signals()}
    )
    handlers: dict[str, list[logging.Handler]] = field(
        default_factory=lambda: {name: list(logger.handlers) for name, logger in _loggers().items()}
    )


_beginning: Beginning | None = None
_registered: list[Callable[..., Any]] = []  # by the script with atexit


def note_beginning() -> None:
    """Keep the process's state; called once, when the script has imported torch."""
    global _beginning
    _beginning = Beginning()


def wrap_register(original: Any) -> Any:
    """atexit.register: note the script's own functions."""

    def register(function: Any, *args: Any, **kwargs: Any) -> Any:
        if has_muted_effects(fail_open.caller().f_code.co_filename):
            _registered.append(function)
        return original(function, *args, **kwargs)

    return register


def threads_of_user() -> list[str]:
    """Names of the threads other than the main one that run the user's code: they cannot be ended from outside."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    return [names.get(ident, "?") for ident, frame in frames.items() if ident != main and _is_in_user_code(frame)]


def _is_in_user_code(frame: Any) -> bool:
    while frame is not None:
        if has_muted_effects(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def clear(error: BaseException) -> None:
    """Forget a run of the script that an error has ended; its connections are cut already."""
    Effects.close_files()
    _leave_process_groups()
    _clear_frames(error)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    for function in _registered:
        atexit.unregister(function)
    _registered.clear()
    of_steps = (step_hooks, optimizer_registry, model_tensors, gradients, open_boundaries)
    for room in (*of_steps, installing, thread_collectives):
        room.forget()
    _empty_shared_states()
    _forget_modules()
    gc.collect()
    _end_children()
    if _beginning is not None:
        _restore(_beginning)
    origins.drawn_since_last_asked()


def _leave_process_groups() -> None:
    destroy: Any = dist.destroy_process_group
    if dist.is_initialized():
        getattr(destroy, "__wrapped__", destroy)()


def _clear_frames(error: BaseException) -> None:
    """Drop the script's variables, also those held by the errors that caused this one."""
    for cause in causes_of(error, also_handled=True):
        _clear_frames_of(cause.__traceback__)
        cause.__traceback__ = None


def _clear_frames_of(trace: TracebackType | None) -> None:
    """As traceback.clear_frames, and cut the traceback, which the caller of sys.excepthook holds.

    A frame keeps its function, hence its closure: only the outermost frame, the script's module, remains. Python up to
    3.12 also keeps a copy of a frame's variables, made for `locals()`: reading f_locals refreshes it.
    """
    while trace is not None:
        with contextlib.suppress(RuntimeError):  # still running
            trace.tb_frame.clear()
            trace.tb_frame.f_locals  # noqa: B018
        trace.tb_next, trace = None, trace.tb_next


def _empty_shared_states() -> None:
    """Empty what a framework's objects share, by which the next run would take all as set up."""
    for name in frameworks.SHARED:
        module, _, path = name.partition(":")
        state: Any = sys.modules.get(module)
        for part in path.split("."):
            state = getattr(state, part, None)
        if isinstance(state, dict):
            state.clear()


def _forget_modules() -> None:
    """Clear the script and the user's modules: a function of theirs that is still held must not see old values."""
    for name in user_code.loaded:
        module = sys.modules.pop(name, None)
        if module is not None:
            vars(module).clear()
    user_code.loaded[:] = ["__main__"]


def _end_children() -> None:
    """Kill the run's child processes, which would have ended with this process."""
    trackers: tuple[Any, ...] = (
        multiprocessing.resource_tracker._resource_tracker,
        multiprocessing.forkserver._forkserver,
    )
    spared = {getattr(tracker, name, None) for tracker in trackers for name in ("_pid", "_forkserver_pid")}
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    for pid in _children():
        if pid not in spared:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as children:
            pids += map(int, children.read().split())
    return pids


def _restore(beginning: Beginning) -> None:
    os.chdir(beginning.directory)
    if os.environ != beginning.environment:
        os.environ.clear()
        os.environ.update(beginning.environment)
    sys.path[:] = beginning.path
    sys.stdout, sys.stderr = beginning.streams
    sys.excepthook = beginning.excepthook
    for number, handler in beginning.signals.items():
        present: Any = signal.getsignal(number)
        code = getattr(present, "__code__", None) if handler is not None else None
        if code is not None and present is not handler and has_muted_effects(code.co_filename):
            signal.signal(number, handler)
    for name, logger in _loggers().items():
        if _is_of_user(name):
            for added in [handler for handler in logger.handlers if handler not in beginning.handlers.get(name, ())]:
                logger.removeHandler(added)
                with contextlib.suppress(Exception):
                    added.close()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(beginning.dtype)
    torch.set_default_device(None)
    random_state.restore(beginning.random)


def _loggers() -> dict[str, logging.Logger]:
    loggers = logging.Logger.manager.loggerDict
    named = {name: logger for name, logger in loggers.items() if isinstance(logger, logging.Logger)}
    return {"": logging.getLogger(), **named}


def _is_of_user(name: str) -> bool:
    """Whether no imported library has this logger's name: a library sets up its own once, when it is imported."""
    return name.partition(".")[0] not in sys.modules
