"""The event log: one JSON line for each thing that happened, in the run directory's `events.jsonl`."""

from __future__ import annotations

import csv
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ttprun.observe.status import IncidentStatus

# When each phase of an incident went on: what the page, reports and `ttprun status` draw.


PHASES = ("detect", "freeze", "spawn", "replay", "transfer", "rebuild", "reissue")
COLUMNS = (*PHASES, "total")  # of a table of phases
_IN_ORDER = ("replay", "transfer", "rebuild", "reissue")  # each begins when the one before it ends


def spans_of(incident: IncidentStatus) -> list[tuple[str, float, float]]:
    """(phase, beginning, end) of each phase that was reached, in seconds since the loss was noticed.

    They follow one another. The replacement is started while the others freeze: "spawn" is what is left of its start
    when they have.
    """
    spans: list[tuple[str, float, float]] = []
    end_s = incident.freeze_s or 0.0
    if incident.detect_s is not None:
        spans.append(("detect", -incident.detect_s, 0.0))
    if incident.freeze_s is not None:
        spans.append(("freeze", 0.0, end_s))
    if incident.spawn_s is not None:
        started_s = max(end_s, incident.spawn_s)
        spans.append(("spawn", end_s, started_s))
        end_s = started_s
    for phase in _IN_ORDER:
        took_s = getattr(incident, f"{phase}_s")
        if took_s is not None:
            spans.append((phase, end_s, end_s + took_s))
            end_s += took_s
    return spans


def seconds_of(incident: IncidentStatus) -> dict[str, float]:
    """How long each phase that was reached took of the whole, and of one that has ended the "total"."""
    seconds = {phase: end_s - start_s for phase, start_s, end_s in spans_of(incident)}
    return seconds if incident.total_s is None else seconds | {"total": incident.total_s}


# Kinds of event for which a command can be run (`--on-event`), and those for which it is.
Kind = Literal[
    "incident_opened",
    "incident_ended",
    "run_ended",
    "launcher_died",
    "stalled",
    "straggler",
    "nan_found",
    "node_lost",
    "node_replaced",
    "checkpoint_written",
    "checkpoint_failed",
    "rank_unprotected",
    "replicas_diverged",
    "supervisor_failed",
]
USUAL: tuple[Kind, ...] = (
    "incident_ended",
    "run_ended",
    "launcher_died",
    "stalled",
    "nan_found",
    "node_lost",
    "checkpoint_failed",
    "replicas_diverged",
    "supervisor_failed",
)

logger = logging.getLogger(__name__)


def timestamp() -> str:
    """Now, as ISO 8601 in UTC with milliseconds: `2026-01-31T12:00:00.000+00:00`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def unix_s(at: str) -> float:
    """Seconds since 1970 of a time in the status or the event log."""
    return datetime.fromisoformat(at).timestamp()


class EventLog:
    """Appends events to a file. Never raises: a full disk says so once, and later events are tried in silence."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._fd: int | None = None
        self._has_warned = False
        self._is_torn = False  # the last line was cut off by a full disk, so the next must not continue it

    def append(self, event: str, **fields: object) -> None:
        """Write `{"at": now, "event": event, **fields}`; a field that JSON does not know is written as text."""
        line = json.dumps({"at": timestamp(), "event": event, **fields}, default=str) + "\n"
        data = (("\n" if self._is_torn else "") + line).encode()
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # One write a line: with O_APPEND lines of several threads do not mix.
            written = os.write(self._fd, data)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return
        self._is_torn = written < len(data)
        if self._is_torn:
            self._warn("the disk is full")

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("events are not written to %s (%s); the job continues", self._path, reason)


def read_events(path: str | Path) -> Iterator[dict[str, object]]:
    """Yield the events of a log in order; a line that was cut off is left out. Raises OSError if there is no log."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


def read_on(path: str | Path, at: int) -> Iterator[tuple[int, bytes]]:
    """(where it ends in the file, line) of each whole line from there on; the last one may still be written.

    Nothing if the log cannot be read.
    """
    with suppress(OSError), open(path, "rb") as log:
        log.seek(at)
        for line in log:
            if line.endswith(b"\n"):
                yield (at := at + len(line)), line


# How far a run was, and when: `history.csv`, a line for each moment at which its step had changed.
#
# Lines are a second apart at first, and further apart the longer a run lasts, so that a week takes some hundred kB.


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
