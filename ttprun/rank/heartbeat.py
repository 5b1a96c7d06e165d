"""A rank's heartbeat: shows whether its main thread is running bytecode.

About once a second a thread writes the time to the board (PULSE_NS), and asks the interpreter to have the main thread
call a C function between two bytecodes (`Py_AddPendingCall`). That function is the C library's `sem_post`, on a
semaphore in the board (MAIN_BEATS): it adds one and returns, so no Python code of ours runs in the user's main thread
and no profiler or tracer sees it. The agent reads:

    both advance                the main thread runs bytecode
    only the pulse advances     the main thread is in a C call that has released the GIL (it waits, or it computes)
    neither advances            a thread holds the GIL, or the process is stopped (/proc shows which)

Between two beats the thread writes the stacks of all threads whenever the agent asks for them (STACK_ASKED).

The semaphore's memory stays mapped until the process is gone, so a call that is pending at its end does no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ttprun.protocol.board import Board, Field

# A robust lock that this process's main thread holds as long as it lives: the kernel wakes the agent when it dies.
#
# A dying process frees its memory before its exit is visible: tens of milliseconds for one with torch, seconds for a
# big one. Before that the kernel marks the robust locks that a dying thread holds, and wakes their waiters, so the
# agent knows at once (`agent/base/life_signs.py`). The lock is the C library's, in this rank's row of the board
# (LIFE).


SHARED = ROBUST = 1
FUTEX_WAITERS = 0x80000000
LOCK_BYTES = 48  # of pthread_mutex_t; 40 on most machines


def hold(board: Board, row: int) -> None:
    """Take the lock; main thread only. If a C library other than glibc refuses, there is none.

    row   of this rank on its node's board
    """
    libc = ctypes.CDLL(None)
    address = board.address_of(row, Field.LIFE)
    lock, attributes = ctypes.c_void_p(address), ctypes.create_string_buffer(64)
    ctypes.memset(address, 0, LOCK_BYTES)
    libc.pthread_mutexattr_init(attributes)
    libc.pthread_mutexattr_setpshared(attributes, SHARED)
    libc.pthread_mutexattr_setrobust(attributes, ROBUST)
    if libc.pthread_mutex_init(lock, attributes) or libc.pthread_mutex_lock(lock):
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(board))  # keep it mapped when the interpreter clears everything
    word = ctypes.c_uint32.from_address(address)
    if word.value == threading.get_native_id():
        word.value |= FUTEX_WAITERS  # the agent waits without having touched it


# Room for files of our own in a process that has as many open as its soft limit allows (`ulimit -n`).


@contextmanager
def with_room() -> Iterator[None]:
    """Inside, the soft limit is the hard one; afterwards it is the script's again, and what is open stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The Python stacks of this rank's threads, for the agent, which reads them from a memfd.
#
# A thread of ours writes them when the agent asks (`heartbeat`): it holds the GIL, so no other thread changes its
# frames meanwhile. If it does not get the GIL, whoever has it makes no progress, and the agent sends SIGNAL, whose
# handler in C needs none. With a GIL that is passed around that handler may read a frame that another thread is just
# leaving, and crash the rank: 2 of 1900 times with three busy threads (Python 3.11). The same file gets the stack of
# a crash (SIGSEGV, SIGABRT and the like), unless the user has asked for faulthandler himself.


SIGNAL = signal.SIGRTMAX - 7  # the C library uses the lowest real-time signals; debuggers and runtimes, the low half

_has_enabled = False
_fd = -1


def write_when_asked(fd: int) -> None:
    """Write the stacks of all threads to `fd` from now on: at `write`, whenever SIGNAL comes, and in a crash."""
    global _has_enabled, _fd
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
        _fd = fd
        if not faulthandler.is_enabled():
            faulthandler.enable(file=fd, all_threads=True)
            _has_enabled = True


def write() -> None:
    """Write them now; nothing if no file was named."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if _fd >= 0:
            faulthandler.dump_traceback(_fd, all_threads=True)


def forget() -> None:
    """In a forked child, which has closed the file: stop writing to its descriptor, which may be reused."""
    global _fd
    _fd = -1
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        faulthandler.unregister(SIGNAL)
        if _has_enabled:
            faulthandler.disable()


EVERY_S = 1.0
has_in_flight: Callable[[], bool] = bool  # whether a collective is under way: of the hooks, once they are there
_COUNT_MASK = 0x7FFFFFFF  # the semaphore's value; the bits above count waiters (none)


def start(board: Board, row: int, look: Callable[[], None] = lambda: None) -> None:
    """Start the thread. Without Py_AddPendingCall or sem_post it writes the pulse alone.

    look   called at each beat; must be quick, and raise nothing
    """
    threading.Thread(target=_beat, args=(board, row, look), name="ttprun-heartbeat", daemon=True).start()


def _beat(board: Board, row: int, look: Callable[[], None]) -> None:
    try:
        sem_post = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p)
        add_pending_call = ctypes.pythonapi.Py_AddPendingCall
        add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    except AttributeError:
        add_pending_call = None
    semaphore = board.address_of(row, Field.MAIN_BEATS)
    asked = board.get(row, Field.MAIN_BEATS) & _COUNT_MASK
    answered = 0
    while True:
        board.set(row, Field.NONE_IN_FLIGHT, not has_in_flight())
        board.set(row, Field.PULSE_NS, time.monotonic_ns())
        # One at a time: a main thread in a long C call must not find a full queue of pending calls.
        count = board.get(row, Field.MAIN_BEATS)
        is_answered = (count - asked) & _COUNT_MASK < _COUNT_MASK >> 1
        if add_pending_call is not None and is_answered and add_pending_call(sem_post, semaphore) == 0:
            asked = (count + 1) & _COUNT_MASK
        look()
        answered = _rest(board, row, answered, time.monotonic() + EVERY_S)


def _rest(board: Board, row: int, answered: int, until_s: float) -> int:
    """Sleep until then, and write the stacks when they are asked for; returns the newest request that was answered."""
    while (left_s := until_s - time.monotonic()) > 0:
        asked = board.get(row, Field.STACK_ASKED)
        if asked not in (0, answered):
            write()
            answered = asked
        board.wait_for_change(row, Field.STACK_ASKED, asked, left_s)
    return answered
