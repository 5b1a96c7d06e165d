"""A robust lock that this process's main thread holds as long as it lives: the kernel wakes the agent when it dies.

A dying process frees its memory before its exit is visible: tens of milliseconds for one with torch, seconds for a big
one. Before that the kernel marks the robust locks that a dying thread holds, and wakes their waiters, so the agent
knows at once (`agent/processes/life_locks.py`). The lock is the C library's, in this rank's row of the board (LIFE).
"""

from __future__ import annotations

import ctypes
import threading

from ttprun.protocol.board import Board, Field

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
