"""Signals by which schedulers end jobs, and which must not end a rank before the job's state is saved.

Slurm's `scancel` and systemd signal every process of a job, and not the launcher alone: ranks that died of that at once
would take with them what the launcher is about to save. So a rank that gets such a signal looks for a moment whether
the launcher has got one too. If so it lives on till the agent tells it to end, which it does when the state is saved;
else it was meant alone, and dies of it a moment later.

To the script the signals are untouched: `signal.getsignal` says that they have their default, a handler of its own
takes the place of ours, and what it starts or forks is as without us. Begin with `hold`.
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

from ttprun.protocol.board import LEADER, Board, Field

HELD = (signal.SIGTERM, signal.SIGUSR1)
MOMENT_S = 0.5  # a scheduler signals all processes of a job within milliseconds
_SPREAD_S = 0.1  # between the first process that is signalled and the last one
_DEATH_LIMIT_S = 10 * MOMENT_S
_NO_SIGNAL = 0

_set_handler, _handler_of = signal.signal, signal.getsignal
_read_fd = _write_fd = -1
_board: Board | None = None
_came = False
_told = threading.Event()


def hold(board: Board) -> None:
    """Hold those signals from now on that have their default; main thread only."""
    global _read_fd, _write_fd, _board
    _board = board
    _read_fd, _write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in HELD:
        if _handler_of(number) is signal.SIG_DFL:
            _set_handler(number, _stay)
    # Python calls a handler when its main thread runs bytecode, which it may not do for long.
    others = signal.set_wakeup_fd(_write_fd, warn_on_full_buffer=False)
    if others >= 0:
        signal.set_wakeup_fd(others, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(_read_fd,), name="ttprun-signals", daemon=True).start()


def tell_to_end() -> None:
    """The agent has told this process to end: a signal that is held ends it."""
    _told.set()
    _wake(_NO_SIGNAL)


def is_end_near() -> bool:
    """Whether a signal is held, or the launcher has got one: this process will be ended, whatever the script does."""
    return _came or _is_end_asked()


def wait_for_end() -> None:
    """Block till the agent has told this process to end, or a signal ends it; the agent kills who does not end."""
    _told.wait()


def wait_while_meant_alone(number: int) -> None:
    """Stand still behind a signal that this process has got, if it is held: it dies of it in a moment.

    Returns if the launcher has got one too, if the signal is not held, and if it did not come after all.
    """
    _is_soon(lambda: _handler_of(number) is not _stay or _is_end_asked(), _DEATH_LIMIT_S)


def release_in_child() -> None:
    """In a forked child the signals have their default again."""
    global _read_fd, _write_fd, _came, _told
    if _write_fd < 0:
        return
    for number in HELD:
        if _handler_of(number) is _stay:
            _set_handler(number, signal.SIG_DFL)
    others = signal.set_wakeup_fd(-1)
    if others not in (-1, _write_fd):
        signal.set_wakeup_fd(others, warn_on_full_buffer=False)
    os.close(_read_fd)
    os.close(_write_fd)
    _read_fd, _write_fd, _came, _told = -1, -1, False, threading.Event()


def wrap_getsignal(original: Any) -> Any:
    """signal.getsignal: our handler is none."""

    def getsignal(*args: Any, **kwargs: Any) -> Any:
        return _told_of(original(*args, **kwargs))

    return getsignal


def wrap_signal(original: Any) -> Any:
    """signal.signal: the same for what it returns."""

    def set_handler(*args: Any, **kwargs: Any) -> Any:
        return _told_of(original(*args, **kwargs))

    return set_handler


def wrap_error_if_any_worker_fails(original: Any) -> Any:
    """torch's answer to the end of a DataLoader's worker: none if the worker was signalled as this process is.

    It raises wherever the main thread is, and what it breaks off there could not be saved.
    """

    def error_if_any_worker_fails() -> Any:
        try:
            return original()
        except RuntimeError:
            if not _is_soon(is_end_near, _SPREAD_S):
                raise

    return error_if_any_worker_fails


def _is_soon(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether it comes true within that time; it is asked again and again, as the board tells nobody of a change."""
    ends_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < ends_s:
        time.sleep(0.01)
    return condition()


def _told_of(handler: Any) -> Any:
    return signal.SIG_DFL if handler is _stay else handler


def _stay(number: int, frame: FrameType | None) -> None:
    _wake(number)  # the script may have taken the wake-up descriptor for itself


def _wake(number: int) -> None:
    with contextlib.suppress(OSError):  # full: then it wakes up anyhow; or none is held
        os.write(_write_fd, bytes([number]))


def _is_end_asked() -> bool:
    return _board is not None and _board.get(LEADER, Field.END_ASKED) != 0


def _watch(read_fd: int) -> None:
    global _came
    held = 0
    looks_at_s: float | None = None  # when it is time to see whether the launcher has got one too
    while True:
        wait_s = None if looks_at_s is None else max(0.0, looks_at_s - time.monotonic())
        select.select([read_fd], [], [], wait_s)
        with contextlib.suppress(BlockingIOError):
            for number in os.read(read_fd, 256):
                if number in HELD and not held and _handler_of(number) is _stay:
                    held, looks_at_s, _came = number, time.monotonic() + MOMENT_S, True
        is_late = looks_at_s is not None and time.monotonic() >= looks_at_s
        if held and (_told.is_set() or (is_late and not _is_end_asked())):
            _die_of(held)
        if is_late:
            looks_at_s = None


def _die_of(number: int) -> None:
    """End the process as this signal does if nobody holds it; on any thread, where Python sets no handlers."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(number, None)
    os.kill(os.getpid(), number)
