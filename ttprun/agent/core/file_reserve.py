"""Descriptors that the launcher keeps for a repair, a checkpoint and its own end when no others are left.

Without them a launcher with as many open files as it may have (`ulimit -n`) could neither replace a rank nor save what
the others hold. Begin with `FileReserve.look`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time

logger = logging.getLogger("ttprun")

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
