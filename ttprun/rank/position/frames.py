"""The user's part of the call stack: the frames that are recorded (see whose.py), and their places.

The names of frames are the same in every rank that runs the same script, so places can be compared between processes.
"""

from __future__ import annotations

import ctypes
import sys
from types import FrameType
from typing import Any

import xxhash

from ttprun.rank.position.whose import records_frames

# Types whose values are recorded as they are.
SCALARS = frozenset({int, float, bool, str, type(None), bytes})


def user_frames(start: FrameType | None) -> list[FrameType]:
    """The user's frames from the outermost to the one nearest to `start`."""
    found = []
    frame = start
    while frame is not None:
        if records_frames(frame.f_code.co_filename):
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
        if records_frames(filename):
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
        if records_frames(frame.f_code.co_filename):
            users = len(calls)
        frame = frame.f_back
    return f"{location_key()} {xxhash.xxh3_64_hexdigest(' '.join(calls[:users]).encode())}"


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running frame; of a module, its own dictionary."""
    scope: Any = frame.f_locals
    return scope if type(scope) is dict else dict(scope)  # Python 3.13 looks up a function's one by one


def set_local(frame: FrameType, name: str, value: object) -> None:
    """Write a variable of a running frame (module, function or generator)."""
    scope = frame.f_locals
    scope[name] = value
    if scope is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def unset_local(frame: FrameType, name: str) -> bool:
    """Delete a variable of a running frame; False if this Python cannot do that in a function."""
    scope = frame.f_locals
    if scope is not frame.f_globals and sys.version_info >= (3, 12):
        return False  # 3.12 writes None, with a warning
    del scope[name]
    if scope is not frame.f_globals:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(1))
    return True
