"""Hold the signals by which schedulers end jobs, until the job's state is saved.

Slurm's `scancel` and systemd signal every process of a job, not only the launcher: ranks that died of that at once
would lose the state that the launcher is about to save. So a rank that gets such a signal waits a moment to see whether
the launcher has got one too. If so it lives until the agent orders it to end, after the state is saved; otherwise the
signal was meant for this rank alone, which dies of it.

The script sees no difference: `signal.getsignal` returns the default, a handler of its own replaces ours, and its child
processes have the default. Begin with `hold`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ttprun.introspect import signal_handlers
from ttprun.protocol.board import LEADER, Board, Field
from ttprun.protocol.patience import Patience, is_agent_awake

HELD = (signal.SIGTERM, signal.SIGUSR1)
MOMENT_S = 0.5  # a scheduler signals all processes of a job within milliseconds
_SPREAD_S = 0.1  # between the first process that is signalled and the last one
_DEATH_LIMIT_S = 10 * MOMENT_S
_LOOK_AGAIN_S = 0.01
_SAVED_LIMIT_S = 660.0  # the agent ends a job within its limits for halting and for saving; then nobody saves
_NO_SIGNAL = 0

_set_handler, _handler_of = signal.signal, signal.getsignal
_read_fd = _write_fd = -1
_board: Board | None = None
_came = False
_may_end = threading.Event()
_is_saved = threading.Event()


def hold(board: Board) -> None:
    """Hold those of the signals that have their default handler; main thread only."""
    global _read_fd, _write_fd, _board
    _board = board
    _read_fd, _write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in HELD:
        if _handler_of(number) is signal.SIG_DFL:
            _set_handler(number, _stay)
    signal_handlers.wrap_all(but=_stay)
    signal_handlers.Now.is_ending = _is_ending
    # Python calls a handler only when its main thread runs bytecode, so a thread reads the wake-up descriptor.
    others = signal.set_wakeup_fd(_write_fd, warn_on_full_buffer=False)
    if others >= 0:
        signal.set_wakeup_fd(others, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(_read_fd,), name="ttprun-signals", daemon=True).start()


def let_end() -> None:
    """The agent orders this process to end: a held signal now ends it."""
    _may_end.set()
    _is_saved.set()
    _wake(_NO_SIGNAL)


def is_end_near() -> bool:
    """Whether a signal is held, or the launcher has got one: this process will be ended."""
    return _came or _is_end_asked()


def note_saved() -> None:
    """This rank has written its part of the state, and all go on: it is no longer needed."""
    _is_saved.set()


def wait_until_saved() -> None:
    """Block until the state is saved, or the agent orders this process to end; _SAVED_LIMIT_S at most."""
    _is_saved.wait(_SAVED_LIMIT_S)


def wait_while_meant_alone(number: int) -> None:
    """After an injected signal: block while this process is about to die of it.

    Returns if the launcher has got one too, if the signal is not held, and at the latest after _DEATH_LIMIT_S.
    """
    _is_soon(lambda: _handler_of(number) is not _stay or _is_end_asked(), _DEATH_LIMIT_S)


def release_in_child() -> None:
    """In a forked child: restore the default handlers."""
    global _read_fd, _write_fd, _came, _may_end
    if _write_fd < 0:
        return
    for number in HELD:
        if _handler_of(number) is _stay:
            _set_handler(number, signal.SIG_DFL)
    signal_handlers.unwrap_all()
    others = signal.set_wakeup_fd(-1)
    if others not in (-1, _write_fd):
        signal.set_wakeup_fd(others, warn_on_full_buffer=False)
    os.close(_read_fd)
    os.close(_write_fd)
    _read_fd, _write_fd, _came, _may_end = -1, -1, False, threading.Event()


def wrap_getsignal(original: Any) -> Any:
    """signal.getsignal: show our handler as the default."""

    def getsignal(*args: Any, **kwargs: Any) -> Any:
        return _shown(original(*args, **kwargs))

    return getsignal


def wrap_signal(original: Any) -> Any:
    """signal.signal: the same for the handler that it returns; the new one is not to run inside our code."""

    def set_handler(*args: Any, **kwargs: Any) -> Any:
        args = *args[:1], *map(signal_handlers.wrapped, args[1:])
        return _shown(original(*args, **{name: signal_handlers.wrapped(given) for name, given in kwargs.items()}))

    return set_handler


def wrap_error_if_any_worker_fails(original: Any) -> Any:
    """torch's check for dead DataLoader workers: raise nothing if the worker was signalled with the whole job.

    It would raise wherever the main thread is, and interrupt the saving.
    """

    def error_if_any_worker_fails() -> Any:
        try:
            return original()
        except RuntimeError:
            if not _is_soon(is_end_near, _SPREAD_S):
                raise

    return error_if_any_worker_fails


def _is_soon(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether it becomes true within that time; polled, as the board cannot notify."""
    patience = Patience(limit_s, _is_agent_awake)
    while not condition() and not patience.look():
        time.sleep(_LOOK_AGAIN_S)
    return condition()


def _shown(handler: Any) -> Any:
    return signal.SIG_DFL if handler is _stay else signal_handlers.unwrapped(handler)


def _stay(number: int, frame: FrameType | None) -> None:
    _wake(number)  # the script may have taken the wake-up descriptor for itself


def _wake(number: int) -> None:
    with contextlib.suppress(OSError):  # the pipe is full (the thread wakes up anyhow), or no signal is held
        os.write(_write_fd, bytes([number]))


def _is_end_asked() -> bool:
    return _board is not None and _board.get(LEADER, Field.END_ASKED) != 0


def _is_agent_awake() -> bool:
    return _board is None or is_agent_awake(_board)


def _is_ending() -> bool:
    return _is_end_asked() or (_board is not None and _board.get(LEADER, Field.ENDED_BY) != 0)


def _watch(read_fd: int) -> None:
    global _came
    number_held = 0
    moment: Patience | None = None  # after which it is checked whether the launcher has got one too
    written = select.poll()  # select() refuses the high descriptors of a process that has many files open
    written.register(read_fd, select.POLLIN)
    while True:
        written.poll(None if moment is None else 1000 * _LOOK_AGAIN_S)
        with contextlib.suppress(BlockingIOError):
            for number in os.read(read_fd, 256):
                if number in HELD and not number_held and _handler_of(number) is _stay:
                    number_held, moment, _came = number, Patience(MOMENT_S, _is_agent_awake), True
        is_late = moment is not None and moment.look()
        if number_held and (_may_end.is_set() or (is_late and not _is_end_asked())):
            _die_of(number_held)
        if is_late:
            moment = None


def _die_of(number: int) -> None:
    """End the process as this signal does by default; on any thread (Python sets handlers in the main thread only)."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(number, None)
    os.kill(os.getpid(), number)
