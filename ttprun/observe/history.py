"""How far a run was, and when: `history.csv`, a line for each moment at which its step had changed.

Lines are a second apart at first, and further apart the longer a run lasts, so that a week takes some hundred kB.
"""

from __future__ import annotations

import csv
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_EVERY_S = 1.0
_PER_RUN = 2_000  # lines in the time that a run has lasted so far


@dataclass(frozen=True)
class Point:
    """At `unix_s` the job had passed `step` optimizer steps."""

    unix_s: float
    step: int


class History:
    """Appends to the file. Never raises: a full disk makes a gap."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_s = time.monotonic()
        self._written_s = 0.0
        self._written_step = self._step = -1
        self._stepped_unix_s = 0.0

    def note(self, step: int, is_last: bool = False) -> None:
        """The job has passed that many steps; `is_last`: it has ended, and this is written in any case."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._stepped_unix_s = step, time.time()  # when it got there, not when that is written
        pause_s = max(_EVERY_S, (now - self._began_s) / _PER_RUN)
        if step == self._written_step or (now - self._written_s < pause_s and not is_last):
            return
        self._written_step, self._written_s = step, now
        with suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, f"{self._stepped_unix_s:.3f},{step}\n".encode())
            finally:
                os.close(fd)


def read_history(path: Path, since_unix_s: float = 0.0) -> list[Point]:
    """The points that are not older, in order; lines that were cut off are left out. Empty without a file."""
    points = []
    with suppress(OSError, csv.Error), open(path, encoding="utf-8", errors="replace", newline="") as lines:
        for row in csv.reader(lines):
            with suppress(ValueError):
                unix_s, step = row
                points.append(Point(float(unix_s), int(step)))
    return [point for point in points if point.unix_s >= since_unix_s]
