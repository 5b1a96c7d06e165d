"""The launcher's own lines on stderr: plain, with time and level, or as JSON (`--log-format`). Begin with `use`.

The lines of all loggers without a handler of their own come out in the same form. What the ranks print is theirs,
and is passed on as it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

LogFormat = Literal["plain", "time", "json"]

# A line has 400 letters at most, with its time and the program's name: a longer one is cut behind sentences.
_PART = re.compile(r".{1,350}$|.{1,348}[.;] |.{1,350}")

_used: LogFormat = "plain"
_run_id = ""


class _Formatter(logging.Formatter):
    """Writes log records in the form that is used now."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return line_of(text, record.levelname, record.created)


def use(log_format: LogFormat, run_id: str) -> None:
    """From now on, write the launcher's lines in this form; `run_id` stands in each line of JSON.

    Loggers that somebody has set up before are left alone.
    """
    global _used, _run_id
    _used, _run_id = log_format, run_id
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def say(text: str, level: str = "WARNING", prefix: str = "ttprun: ") -> None:
    """Write a line at once, whatever loggers are set up; a text of several lines is one line of JSON.

    Nothing if nobody reads stderr, or its device is full: a job goes on without its lines.

    prefix   begins the line, if it is not JSON
    """
    with contextlib.suppress(OSError):
        print(line_of(text, level, datetime.now(UTC).timestamp(), prefix), file=sys.stderr, flush=True)


def line_of(text: str, level: str, unix_s: float, prefix: str = "ttprun: ") -> str:
    """A message in the form that is used now; times are UTC."""
    at = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    if _used == "json":
        about = {"run_id": _run_id} if _run_id else {}
        return json.dumps({"time": at, "level": level, **about, "message": text}, ensure_ascii=False)
    if prefix:  # else it is a report of torch's
        first, *more = text.split("\n")
        parts = _PART.findall(first)
        if left_out := sum(map(len, parts[3:])):
            parts[2:] = [f"{parts[2][:300]}... ({left_out + len(parts[2][300:])} letters more: ttprun status)"]
        text = "\n".join([f"\n{prefix}".join(map(str.rstrip, parts)), *more])
    return f"{at} {level} {prefix}{text}" if _used == "time" else f"{prefix}{text}"


# How far a long piece of work is: a line on stderr for who waits for it, or in the log; nothing for a short one.


logger = logging.getLogger("ttprun")

SILENT_S = 2.0
# Between two lines: on a terminal one line is written over the last, elsewhere each stays.
_TERMINAL_S = 0.5
_PIPE_S = 10.0
_LOG_S = 5.0


def format_bytes(size: float) -> str:
    """A number of bytes for people, in powers of 1000 as disks are sold: "1.2 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class ProgressLine:
    """Shows, from a thread of its own, how far the work inside `with` is, once that has taken SILENT_S seconds.

    what   the work, as "verifying step-00000120"
    of     bytes in all; 0: nothing can be counted, and the seconds are shown
    count  returns the bytes that are done
    """

    def __init__(self, what: str, of: int, count: Callable[[], int]) -> None:
        self._what, self._of, self._count = what, of, count
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self.started_s = time.monotonic()

    def __enter__(self) -> ProgressLine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _show(self) -> None:
        is_terminal = sys.stderr.isatty()
        wait_s = SILENT_S
        while not self._is_over.wait(wait_s):
            wait_s = _TERMINAL_S if is_terminal else _PIPE_S
            text = self._text(self._count(), time.monotonic() - self.started_s)
            print(
                f"\r\x1b[K{text}" if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True
            )
        if is_terminal and wait_s != SILENT_S:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _text(self, done: int, took_s: float) -> str:
        if not self._of:
            return f"{self._what}: {took_s:.0f} s so far"
        share = f"({100 * done // self._of} %)"
        return (
            f"{self._what}: {format_bytes(done)} of {format_bytes(self._of)} {share}, {format_bytes(done / took_s)}/s"
        )


class ProgressLog:
    """Logs the progress of work that begins now, if it takes more than SILENT_S seconds.

    what   the work, as "writing a checkpoint"
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._began_s = time.monotonic()
        self._next_s = self._began_s + SILENT_S

    @property
    def is_due(self) -> bool:
        """Whether `show` would print something now."""
        return time.monotonic() >= self._next_s

    def show(self, done: int, of: int = 0) -> None:
        """`done` bytes are done; `of` is the total, 0 if unknown."""
        if self.is_due:
            now = time.monotonic()
            self._next_s = now + _LOG_S
            total = f" of {format_bytes(of)}" if of else ""
            logger.warning("%s: %s%s in %.0f s", self._what, format_bytes(done), total, now - self._began_s)
