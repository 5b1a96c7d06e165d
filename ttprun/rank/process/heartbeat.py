"""A rank's heartbeat: tells a main thread that runs bytecode from one that does not, with no user code.

About once a second a thread writes the time to the board (PULSE_NS), and asks the interpreter to have its main thread
call a C function between two bytecodes (`Py_AddPendingCall`). That function is the C library's `sem_post`, on a
semaphore in the board (MAIN_BEATS): it adds one and returns, so that no Python code of ours runs in the user's main
thread and no profiler or tracer sees it. The agent reads:

    both go on                  the main thread runs bytecode
    only the pulse goes on      the main thread is in a C call that has let the GIL go (it waits, or it computes)
    neither goes on             a thread holds the GIL, or the process is stopped (/proc tells which)

A forked child has the board but no such thread. At the interpreter's end the thread is a daemon, and the semaphore's
memory stays mapped till the process is gone, so a last call that is still pending does no harm.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from ttprun.protocol.board import Board, Field

EVERY_S = 1.0
_COUNT_MASK = 0x7FFFFFFF  # the semaphore's value; the bits above it count waiters, of whom there are none


def start(board: Board, row: int, look: Callable[[], None] = lambda: None) -> None:
    """Begin to beat. A process without Py_AddPendingCall or sem_post beats with its pulse alone.

    look   called at each beat; it takes no time, and lets no exception out
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
    while True:
        board.set(row, Field.PULSE_NS, time.monotonic_ns())
        # One at a time: a main thread that is away must not find a queue of them, in which others' calls have no room.
        is_answered = board.get(row, Field.MAIN_BEATS) & _COUNT_MASK == asked
        if add_pending_call is not None and is_answered and add_pending_call(sem_post, semaphore) == 0:
            asked = (asked + 1) & _COUNT_MASK
        look()
        time.sleep(EVERY_S)
