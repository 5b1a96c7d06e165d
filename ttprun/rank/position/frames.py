"""The user's part of the call stack: which frames are the user's code, and where they stand.

A file is the user's if it is the script, lies below the script's directory or below a directory of `user_paths`, and is
no installed package. The names of frames are the same in every rank that runs the same script, so a place in the script
can be told to another process as text.
"""

from __future__ import annotations

import ctypes
import os
import site
import sys
import sysconfig
from types import FrameType
from typing import Any

_INSTALLED = tuple(
    path.rstrip(os.sep) + os.sep
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    }
    if path
)
# Types whose values are recorded as they are.
SCALARS = frozenset({int, float, bool, str, type(None), bytes})
_user_directories: list[str] = []
_known: dict[str, bool] = {}


def add_user_directory(path: str) -> None:
    """Files below `path` are the user's from now on."""
    _user_directories.append(os.path.abspath(path).rstrip(os.sep) + os.sep)
    _known.clear()


def is_user_file(filename: str) -> bool:
    """Whether code from this file is the user's."""
    known = _known.get(filename)
    if known is None:
        path = os.path.abspath(filename)
        known = (
            not filename.startswith("<")
            and path.startswith(tuple(_user_directories))
            and not path.startswith(_INSTALLED)
            and f"{os.sep}site-packages{os.sep}" not in path
        )
        _known[filename] = known
    return known


def is_installed(path: str) -> bool:
    """Whether a file or folder belongs to an installed package, or to Python itself."""
    full = os.path.abspath(path) + os.sep
    return full.startswith(_INSTALLED) or f"{os.sep}site-packages{os.sep}" in full


def is_user_class(kind: type) -> bool:
    """Whether a class is defined in the user's code."""
    filename = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(filename) and is_user_file(str(filename))


def user_frames(start: FrameType | None) -> list[FrameType]:
    """The user's frames from the outermost to the one nearest to `start`."""
    found = []
    frame = start
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    found.reverse()
    return found


def place(frames: list[FrameType]) -> list[list[str | int]]:
    """Where these frames stand: [file, function, line] of each, as another process can compare it."""
    return [[frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno] for frame in frames]


def location_key() -> str:
    """The present place in the user's code as one text."""
    parts = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            parts.append(f"{filename}:{frame.f_lineno}")
        frame = frame.f_back
    return "|".join(parts)


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running frame; a module's are the very dictionary that holds them."""
    scope: Any = frame.f_locals
    return scope if type(scope) is dict else dict(scope)  # Python 3.13: a function's are looked up one by one


def set_local(frame: FrameType, name: str, value: object) -> None:
    """Write a variable of a running frame (module, function or generator)."""
    scope = frame.f_locals
    scope[name] = value
    if scope is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def unset_local(frame: FrameType, name: str) -> bool:
    """Take a variable of a running frame away, as `del` does; False if this Python cannot do that to a function."""
    scope = frame.f_locals
    if scope is not frame.f_globals and sys.version_info >= (3, 12):
        return False  # 3.12 writes None, with a warning
    del scope[name]
    if scope is not frame.f_globals:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(1))
    return True
