"""Appends to files are written once, however often the rank is replaced.

Several ranks may append to one file, so it cannot be truncated to its size at a boundary. Instead the bytes that a rank
has appended to a path since its newest boundary are counted in its recorder, and a replacement skips as many.
"""

from __future__ import annotations

import os
from typing import Any

import xxhash

from ttprun.capture.host import Host
from ttprun.capture.records.recorder import Recorder
from ttprun.protocol.board import Field

_to_skip: dict[int, int] = {}  # path's key: bytes that the lost rank has written


def key_of(path: str) -> int:
    """A number for a path, the same in every process; never 0."""
    return xxhash.xxh3_64_intdigest(os.fsencode(path)) or 1


def write(session: Host, key: int, data: Any, write_raw: Any) -> int:
    """Append to a file, without what the lost rank has appended.

    key        of its path, as `key_of` makes it
    data       any object with the buffer protocol, in one piece
    write_raw  takes a memoryview of bytes, and returns how many it has written
    returns    bytes written or skipped
    """
    given = memoryview(data).cast("B")
    skipped = min(_to_skip.get(key, 0), len(given))
    if skipped:
        _to_skip[key] -= skipped
        if skipped == len(given):
            return skipped
    written: int = write_raw(given[skipped:])
    _count(session[Recorder], key, session.board.get(session.rank, Field.RECORDED), written)
    return skipped + written


def _count(recorder: Recorder, key: int, boundary: int, size: int) -> None:
    since, newest, before = recorder.appended(key)
    if since != boundary:
        newest, before = 0, newest if since == boundary - 1 else 0
    recorder.set_appended(key, (boundary, newest + size, before))


def resume_from(recorder: Recorder, boundary: int) -> None:
    """A replacement goes live at a boundary: skip what the lost rank, maybe one boundary ahead, has appended since."""
    _to_skip.clear()
    for key in recorder.appended_keys():
        since, newest, before = recorder.appended(key)
        size = newest if since == boundary else newest + before if since == boundary + 1 else 0
        recorder.set_appended(key, (boundary, size, 0))
        _to_skip[key] = size


def forget(session: Host, path: str) -> None:
    """What the lost rank has appended to this file has been taken out of it."""
    key = key_of(os.path.abspath(path))
    if _to_skip.pop(key, 0):
        session[Recorder].set_appended(key, (session.board.get(session.rank, Field.RECORDED), 0, 0))
