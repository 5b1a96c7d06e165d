"""Calls of functions on the thread that waits on a selector, for other threads."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
from collections.abc import Callable


class Calls:
    """Functions to be called on the selector's thread, in the order in which they came."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        selector.register(self._read_fd, selectors.EVENT_READ, self._take)

    def add(self, function: Callable[[], None]) -> None:
        """Have a function called; returns at once. For any thread."""
        self._functions.put(function)
        self.wake()

    def wake(self) -> None:
        """Let the thread go round once."""
        with contextlib.suppress(OSError):  # the pipe is full: it will
            os.write(self._write_fd, b"x")

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        while not self._functions.empty():
            self._functions.get()()
