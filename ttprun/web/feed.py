"""Follows the files of a run: status, events, history. One reader for all clients, however many there are.

Begin with `Feed.look`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ttprun.observe.events import Point, read_history
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RunStatus, read_status
from ttprun.web.histogram import StepTimes
from ttprun.web.summary import Summary, summarize, unix_s

EVERY_S = 0.5
_SHARE = 20  # a look takes at most a part of the time: for thousands of ranks it comes less often
_EVENTS = 5_000  # the newest, which a page that is opened later gets


@dataclass(frozen=True)
class Line:
    """One line of the event log; `end` is where it ends in the file, its number for who comes again."""

    end: int
    text: str
    event: dict[str, Any]


class Feed:
    """What a run has written so far.

    status     None until the run has one
    lines      the event log of this launch, as far as it is kept
    incidents  of these, "incident" and "resume", all of them
    history    of this launch
    status_json    the status and what it comes to, made once for all pages; topology_json: who holds what, or "null"
    step_times of this launch, since the page is served
    changed    set, and replaced, whenever something is new
    over       set when nothing comes any more
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.status: RunStatus | None = None
        self.summary: Summary | None = None
        self.lines: deque[Line] = deque(maxlen=_EVENTS)
        self.incidents: list[dict[str, Any]] = []
        self.history: list[Point] = []
        self.status_json = ""
        self.topology_json = "null"
        self.step_times = StepTimes()
        self.changed = asyncio.Event()
        self.over = asyncio.Event()
        self._seen: tuple[object, ...] = ()
        self._read_to = 0

    async def follow(self) -> None:
        """Look at the files until it is over."""
        while not self.over.is_set():
            began_s = time.monotonic()
            self.look()
            await asyncio.sleep(max(EVERY_S, _SHARE * (time.monotonic() - began_s)))

    def end(self) -> None:
        """The launcher is about to end: what is in the files now is the last."""
        self.over.set()
        self.look()
        self._wake()

    def look(self) -> None:
        """Read what is new. Files that cannot be read, or are not there yet, are tried again at the next look."""
        seen = tuple(map(_stamp, (self.run.status, self.run.events, self.run.history)))
        if seen == self._seen and not self.over.is_set():
            return
        self._seen = seen
        with suppress(OSError, ValueError):
            self.status = read_status(self.run.status)
        if self.status is None:
            return
        self.step_times.note(self.status)
        started_s = unix_s(self.status.started_at)
        self._read_events(started_s)
        self.history = read_history(self.run.history, started_s)
        self.summary = summarize(self.status, self.history, self.incidents)
        self.status_json = f'{{"status": {self.status.to_json()}, "summary": {json.dumps(asdict(self.summary))}}}'
        with suppress(OSError):
            self.topology_json = self.run.topology.read_text(encoding="utf-8").strip() or "null"
        self._wake()

    def _read_events(self, started_s: float) -> None:
        """Take the lines that were added; the last one may still be written."""
        with suppress(OSError), open(self.run.events, "rb") as log:
            log.seek(self._read_to)
            for raw in log:
                if not raw.endswith(b"\n"):
                    break
                self._read_to += len(raw)
                text = raw.decode(errors="replace").strip()
                with suppress(ValueError, KeyError, TypeError):
                    event = json.loads(text)
                    if unix_s(event["at"]) < started_s:
                        continue  # of an earlier launch in the same directory
                    self.lines.append(Line(self._read_to, text, event))
                    if event["event"] in ("incident", "resume"):
                        self.incidents.append(event)

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _stamp(path: os.PathLike[str]) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size
    return None
