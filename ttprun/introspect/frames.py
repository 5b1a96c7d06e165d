"""The user's part of the call stack: the frames that are recorded (see whose.py), and their places.

The names of frames are the same in every rank that runs the same script, so places can be compared between processes.
"""

from __future__ import annotations

import sys
from types import FrameType

import xxhash

from ttprun.introspect.whose import is_script_code

# Types whose values are recorded as they are.
SCALARS = frozenset({int, float, bool, str, type(None), bytes})


def user_frames(start: FrameType | None) -> list[FrameType]:
    """The user's frames from the outermost to the one nearest to `start`."""
    found = []
    frame = start
    while frame is not None:
        if is_script_code(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    found.reverse()
    return found


def place(frames: list[FrameType]) -> list[list[str | int]]:
    """[file, function, line] of each of these frames, as another process can compare it."""
    return [[frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno] for frame in frames]


def location_key() -> str:
    """The current place in the user's code as a str."""
    parts = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_script_code(filename):
            parts.append(f"{filename}:{frame.f_lineno}")
        frame = frame.f_back
    return "|".join(parts)


def calls_key() -> str:
    """As `location_key`, and which calls inside libraries lead from there to here.

    A library's own loop issues operations at several places for one line of the script.
    """
    calls, users = [], 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        calls.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        if is_script_code(frame.f_code.co_filename):
            users = len(calls)
        frame = frame.f_back
    return f"{location_key()} {xxhash.xxh3_64_hexdigest(' '.join(calls[:users]).encode())}"
