"""The user's part of the call stack: the frames that are recorded (see ownership.py), and their places.

The names of frames are the same in every rank that runs the same script, so places can be compared between processes.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import xxhash

from ttprun.introspect.ownership import ANSWERS, is_script_code

# The variables of a running frame: read, written and deleted without a trace in the frame.
#
# Up to Python 3.12 a function's frame has one dictionary of its variables. `locals()` hands it out, and
# `frame.f_locals` fills it anew: reading that would undo what a script has changed in the dictionary
# (`config = locals(); config["lr"] *= 2`), and keep its values alive. So there the variables are read where the
# interpreter keeps them, `_PyInterpreterFrame.localsplus`. Python 3.13 reads and writes them there itself (PEP 667).


_HAS_PROXIES = sys.version_info >= (3, 13)
# In CPython 3.11 and 3.12: `PyFrameObject.f_frame`, and `localsplus` in what that points to.
_FRAME_AT = 24
_SLOTS_AT = 72
if not _HAS_PROXIES and object.__basicsize__ != 16:  # Py_TRACE_REFS
    raise ImportError(f"ttprun cannot read the variables of functions in this build of Python: {sys.version}")

# By the code's id, since hashing a code is slow: the names of its slots, how many of the first hold no cell, the code.
_names: dict[int, tuple[tuple[str, ...], frozenset[int], CodeType]] = {}


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables that are set in a running frame; of a module or class body, its own dictionary.

    The frame is this thread's, or that of a suspended generator.
    """
    if not _has_slots(frame):
        scope: Any = frame.f_locals
        return scope if type(scope) is dict else dict(scope)
    if _HAS_PROXIES:
        return dict(frame.f_locals)
    names, cells, _ = _names_of(frame.f_code)
    where, (objects, addresses) = _slots_of(frame), _arrays_of(len(names))
    values = objects.from_address(where)
    is_set = addresses.from_address(where)[:]
    variables = {names[at]: values[at] for at, address in enumerate(is_set) if address}
    for at in cells:
        if names[at] in variables:
            _open_cell(variables, names[at])
    return variables


def variable_of(frame: FrameType, name: str) -> Any:
    """One variable that is set in a running function's frame, and in no cell; quicker than all of them."""
    if _HAS_PROXIES:
        return frame.f_locals[name]
    at, _ = _slot(frame, name)
    return ctypes.py_object.from_address(at).value


def set_local(frame: FrameType, name: str, value: object) -> None:
    """Write a variable of a running frame (module, function or generator).

    frame   of this thread, or of a suspended generator
    name    one of the frame's code, or of a module's or class body's dictionary
    """
    if _HAS_PROXIES or not _has_slots(frame):
        frame.f_locals[name] = value
        return
    at, cell = _slot(frame, name)
    if cell is None:
        _write(at, value)
    else:
        cell.cell_contents = value


def unset_local(frame: FrameType, name: str) -> bool:
    """Delete a variable of a running frame; False if this Python cannot do that in a function.

    From 3.12 on, functions read what is certainly set without looking: a missing one would end the process.
    """
    if not _has_slots(frame):
        del frame.f_locals[name]
        return True
    if sys.version_info >= (3, 12):
        return False
    at, cell = _slot(frame, name)
    if cell is None:
        _write(at)
    else:
        del cell.cell_contents
    return True


def _has_slots(frame: FrameType) -> bool:
    """Whether it is a function's or generator's; the code of modules and classes has a dictionary alone."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _names_of(code: CodeType) -> tuple[tuple[str, ...], frozenset[int], CodeType]:
    """The names of a code's slots, in their order; and which of them hold cells."""
    entry = _names.get(id(code))
    if entry is None:
        own = (*code.co_varnames, *(name for name in code.co_cellvars if name not in code.co_varnames))
        names = (*own, *code.co_freevars)
        in_cells = {*code.co_cellvars, *code.co_freevars}
        cells = frozenset(at for at, name in enumerate(names) if name in in_cells)
        entry = _names[id(code)] = (names, cells, code)
    return entry


@functools.cache
def _arrays_of(length: int) -> tuple[Any, Any]:
    """Types of arrays of objects and of addresses; kept, since each is garbage in a cycle when it is let go."""
    return ctypes.py_object * length, ctypes.c_void_p * length


def _slots_of(frame: FrameType) -> int:
    """The address of a frame's first slot."""
    return int(ctypes.c_size_t.from_address(id(frame) + _FRAME_AT).value) + _SLOTS_AT


def _slot(frame: FrameType, name: str) -> tuple[int, Any]:
    """The address of a variable's slot; and the cell that is in it, None if there is none."""
    names, cells, _ = _names_of(frame.f_code)
    at = names.index(name)
    address = _slots_of(frame) + at * ctypes.sizeof(ctypes.c_void_p)
    return address, ctypes.py_object.from_address(address).value if at in cells else None


def _write(address: int, *values: object) -> None:
    """Put a value, or nothing, into a slot, which owns what it holds."""
    slot = ctypes.c_void_p.from_address(address)
    old = slot.value
    for value in values:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    slot.value = id(values[0]) if values else None
    if old is not None:
        ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(old))


def _open_cell(variables: dict[str, Any], name: str) -> None:
    """Put what a cell holds in its place; drop the name if it holds nothing."""
    try:
        variables[name] = variables[name].cell_contents
    except ValueError:
        del variables[name]


# Types whose values are recorded as they are.
SCALARS = frozenset({int, float, bool, str, type(None), bytes})


def user_frames(start: FrameType | None) -> list[FrameType]:
    """The user's frames from the outermost to the one nearest to `start`."""
    frames = []
    frame = start
    while frame is not None:
        if is_script_code(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    return frames


def place(frames: list[FrameType]) -> list[list[str | int]]:
    """[file, function, line] of each of these frames, as another process can compare it."""
    return [[frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno] for frame in frames]


def location_key() -> str:
    """The current place in the user's code as a str."""
    parts = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # without a call for each frame: a library's stacks are deep
        filename = frame.f_code.co_filename
        if ANSWERS[filename]:
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


# Whether the script has nothing left to do: its last statement, `main()` mostly, is returning.


def is_reached(frame: FrameType | None) -> bool:
    """Whether this frame is the script itself, in a statement outside of all loops behind which there is no other.

    frame   the innermost one that is not ours
    """
    if frame is None or frame.f_code.co_name != "<module>" or frame.f_globals.get("__name__") != "__main__":
        return False
    lines = list(frame.f_code.co_positions())
    ends_at = lines[frame.f_lasti // 2][1] or 0
    if any((line or 0) > ends_at for line, *_ in lines[frame.f_lasti // 2 + 1 :]):
        return False
    return not any(
        instruction.offset > frame.f_lasti and instruction.opname.startswith("JUMP_BACKWARD")
        for instruction in dis.get_instructions(frame.f_code)
    )


_F = TypeVar("_F", bound=Callable[..., Any])
WAITS: set[CodeType] = set()


def waits_for_recovery(function: _F) -> _F:
    """A decorator: a thread of the script in this function waits for a recovery, and goes on when that lets it."""
    WAITS.add(function.__code__)
    return function
