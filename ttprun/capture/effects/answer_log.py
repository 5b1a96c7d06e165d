"""What of the world outside is kept in a recorder's log for the next process, beside the results of collectives.

Entries have a negative number in the place of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack

from ttprun.capture.records.recorder import Recorder

ORIGIN = -1  # the times, pids and entropy that the setup has drawn (origins.py)
FILE = -2  # what the file system has answered (file_answers.py)


def keep_origin(recorder: Recorder, drawn: tuple[str, Any]) -> None:
    """Keep a time, pid or entropy that the setup has drawn."""
    recorder.append_log(msgpack.packb((ORIGIN, *drawn)))


def origins_in(log: Iterable[bytes]) -> list[tuple[str, Any]]:
    """What `keep_origin` has kept, oldest first."""
    entries = map(msgpack.unpackb, log)
    return [(place, value) for step, place, value in entries if step == ORIGIN]


def keep_file_answer(recorder: Recorder, kept: tuple[int, Any]) -> int:
    """Keep what the file system has answered; returns the size."""
    packed: bytes = msgpack.packb((FILE, *kept))
    recorder.append_log(packed)
    return len(packed)


def file_answers_in(log: Iterable[bytes]) -> list[tuple[int, Any]]:
    """What `keep_file_answer` has kept, oldest first."""
    entries = map(msgpack.unpackb, log)
    return [(place, entry) for step, place, entry in entries if step == FILE]
