"""The event log: one JSON line for each thing that happened, in the run directory's `events.jsonl`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)


def timestamp() -> str:
    """Now, as ISO 8601 in UTC with milliseconds: `2026-01-31T12:00:00.000+00:00`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


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
