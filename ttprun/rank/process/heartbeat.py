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

import ctypes
import threading
import time
from collections.abc import Callable

from ttprun.protocol.board import Board, Field
from ttprun.rank.process import stack

EVERY_S = 1.0
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
        board.set(row, Field.PULSE_NS, time.monotonic_ns())
        # One at a time: a main thread in a long C call must not find a full queue of pending calls.
        # The board may have become another one (bootstrap/ahead.py), which then shows a beat too many.
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
            stack.write()
            answered = asked
        board.wait_for_change(row, Field.STACK_ASKED, asked, left_s)
    return answered
