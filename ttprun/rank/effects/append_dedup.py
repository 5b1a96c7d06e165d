"""What a rank appends to files: each line comes out once, however often the rank was replaced.

Several ranks may append to one file, so it cannot be cut back to where it was at a boundary. Instead the bytes that a
rank appends to a path since its newest boundary are counted in its recorder, and a replacement that goes live passes
over as many.
"""

from __future__ import annotations

import os
from typing import Any

import xxhash

from ttprun.protocol.board import Field
from ttprun.rank.records.recorder import Recorder
from ttprun.rank.session import Session

_to_skip: dict[int, int] = {}  # path's key: bytes that the lost rank has written already


def key_of(path: str) -> int:
    """A number for a path, the same in every process; never 0."""
    return xxhash.xxh3_64_intdigest(os.fsencode(path)) or 1


def write(session: Session, key: int, data: Any, write_raw: Any) -> int:
    """Append `data` by `write_raw`, but for what the lost rank has appended already; returns the bytes dealt with."""
    given = memoryview(data).cast("B")
    passed = min(_to_skip.get(key, 0), len(given))
    if passed:
        _to_skip[key] -= passed
        if passed == len(given):
            return passed
    written: int = write_raw(given[passed:])
    _count(session.recorder, key, session.board.get(session.local_rank, Field.RECORDED), written)
    return passed + written


def _count(recorder: Recorder, key: int, boundary: int, size: int) -> None:
    since, newest, before = recorder.appended(key)
    if since != boundary:
        newest, before = 0, newest if since == boundary - 1 else 0
    recorder.set_appended(key, (boundary, newest + size, before))


def resume_from(recorder: Recorder, boundary: int) -> None:
    """A replacement goes live at a boundary: it passes over what the lost rank has appended since.

    The lost rank may have recorded one boundary more.
    """
    _to_skip.clear()
    for key in recorder.appended_keys():
        since, newest, before = recorder.appended(key)
        size = newest if since == boundary else newest + before if since == boundary + 1 else 0
        recorder.set_appended(key, (boundary, size, 0))
        _to_skip[key] = size
