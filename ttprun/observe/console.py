"""The launcher's own lines on stderr: plain, with time and level, or as JSON (`--log-format`). Begin with `use`.

The lines of all loggers without a handler of their own come out in the same form. What the ranks print is theirs,
and is passed on as it is.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["plain", "time", "json"]

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

    prefix   begins the line, if it is not JSON
    """
    print(line_of(text, level, datetime.now(UTC).timestamp(), prefix), file=sys.stderr, flush=True)


def line_of(text: str, level: str, unix_s: float, prefix: str = "ttprun: ") -> str:
    """A message in the form that is used now; times are UTC."""
    at = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    if _used == "json":
        about = {"run_id": _run_id} if _run_id else {}
        return json.dumps({"time": at, "level": level, **about, "message": text}, ensure_ascii=False)
    return f"{at} {level} {prefix}{text}" if _used == "time" else f"{prefix}{text}"
