"""Calls of functions on the thread that waits on a selector, for other threads; and work that this one must not do."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

_T = TypeVar("_T")


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

    def in_background(
        self,
        work: Callable[[], _T],
        then: Callable[[_T], None] = lambda result: None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Have something done that may wait, on a thread of its own; then this thread is called with what it gives.

        failed   called on this thread with what `work` raises; None: this thread raises it
        """

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                self.add(partial(failed or _raise, error))
            else:
                self.add(lambda: then(result))

        threading.Thread(target=run, name="ttprun-background", daemon=True).start()

    def wake(self) -> None:
        """Let the thread go round once."""
        with contextlib.suppress(OSError):  # the pipe is full: it will
            os.write(self._write_fd, b"x")

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        while not self._functions.empty():
            self._functions.get()()


def _raise(error: Exception) -> None:
    raise error
