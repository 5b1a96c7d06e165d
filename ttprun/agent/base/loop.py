"""The thread that decides, whatever it decides: calls for it, its parts that may fail, and descriptors in reserve.

An exception in a part that protection does not need costs that part, with a line on the console, and after a while the
part is tried again. Everything else that raises in that thread is a failure of the supervisor. Read `MEANWHILE` first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import selectors
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


def unwatch(selector: selectors.BaseSelector, file: Any) -> None:
    """Wait for it no more, if it was waited for and is open yet."""
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(file)


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


logger = logging.getLogger("ttprun")
AGAIN_S = 60.0

# Part -> what it means for the job that it has failed.
MEANWHILE = {
    "standbys": "a lost rank gets a new process, which takes longer",
    "snapshots": "no newer snapshot is taken",
    "checkpoints in the background": "no checkpoint is completed",
    "times for checkpoints": "a checkpoint may have to wait",
    "comparisons": "the ranks are not compared anew",
    "hang detection": "hangs are not detected",
    "search for ranks without hooks": "a rank without ttprun's hooks is not named",
    "stacks": "the stack of a rank is not shown",
    "incident notes": "`ttprun status` may lack what was compared in an incident",
    "status": "`ttprun status` shows an older state",
    "commands": "commands for this run are not answered",
    "fault injection": "no fault is injected",
    "file reserve": "the launcher may run out of open files",
}


class CannotDecideError(Exception):
    """The machine, or the carrying out of its orders, has failed: no part's failure, whoever had posted the event."""


class Domains:
    """Runs what belongs to a part, and keeps its exceptions.

    log   appends to the event log
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log
        self._again_s: dict[str, float] = {}
        self.cleaners: dict[str, Callable[[], None]] = {}  # by part: called when it has failed

    def look(self, part: str, look: Callable[[], object]) -> None:
        """Time has passed for a part; not while it is off after a failure."""
        if time.monotonic() >= self._again_s.get(part, 0.0):
            self.run(part, look)

    def run(self, part: str, work: Callable[[], _T], failed: Callable[[], _T | None] = lambda: None) -> _T | None:
        """What `work` returns; if it raises, what `failed` does. Raises CannotDecideError only."""
        try:
            return work()
        except CannotDecideError:
            raise
        except Exception as error:
            self.note(part, error)
            return failed()

    def note(self, part: str, error: Exception) -> None:
        """A part has failed: it is off for a while."""
        is_known = time.monotonic() < self._again_s.get(part, 0.0)
        self._again_s[part] = time.monotonic() + AGAIN_S
        text = f"{type(error).__name__}: {error}"
        if not is_known:
            meanwhile = MEANWHILE[part]
            logger.warning(
                "%s failed (%s; please report it): %s; tried again in %d s", part, text, meanwhile, int(AGAIN_S)
            )
            self._log("part_failed", part=part, error=text, traceback="".join(traceback.format_exception(error)))
        clean = self.cleaners.get(part)
        if clean is not None:
            try:
                clean()
            except Exception as another:
                self._log("part_not_cleaned", part=part, error=repr(another))


SIZE = 24  # a replacement, a checkpoint, the run's files
_TAKE_AGAIN_S = 1.0


class FileReserve:
    """Holds SIZE descriptors until they are needed, and again when others have been closed."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._has_warned = False
        self._take_again_s = 0.0
        self._take()

    def look(self) -> None:
        """Give them up if fewer than as many can be opened beside them; costs three system calls."""
        if not self._held:
            self._take()
            return
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError):
            lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.close(lowest)
            if limit == resource.RLIM_INFINITY or lowest + SIZE <= limit:
                return
        self.give_up()
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the launcher has nearly as many open files as it may have ('ulimit -n': %d): the last %d are left for "
                "repairs and checkpoints",
                limit,
                SIZE,
            )

    def give_up(self) -> None:
        """They are needed now."""
        while self._held:
            os.close(self._held.pop())

    def _take(self) -> None:
        """Take them, unless that would leave less than as many to others."""
        now = time.monotonic()
        if now < self._take_again_s:
            return
        self._take_again_s = now + _TAKE_AGAIN_S
        try:
            for _ in range(2 * SIZE):
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.give_up()
        for fd in self._held[SIZE:]:
            os.close(fd)
        del self._held[SIZE:]
