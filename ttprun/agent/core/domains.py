"""What the job's protection does not need: each such part fails by itself in the thread that decides.

An exception in one costs that part, with a line on the console, and after a while the part is tried again. Everything
else that raises in that thread is a failure of the supervisor. Read `MEANWHILE` first.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("ttprun")
AGAIN_S = 60.0
_T = TypeVar("_T")

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
        self._cleaners: dict[str, Callable[[], None]] = {}

    def clean_with(self, part: str, clean: Callable[[], None]) -> None:
        """After a failure of a part have this called, so that it does not fail by the same thing again."""
        self._cleaners[part] = clean

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
        clean = self._cleaners.get(part)
        if clean is not None:
            try:
                clean()
            except Exception as another:
                self._log("part_not_cleaned", part=part, error=repr(another))
