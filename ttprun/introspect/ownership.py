"""Which code counts as the user's: its loops are followed, its frames are recorded and its objects are state
(`is_script_code`), and its effects are muted in a replay (`has_muted_effects`).

A file is the user's if it is not installed: it lies neither in `site-packages` or `dist-packages` (but for a folder
that is linked there), nor in Python's library, in torch, in ttprun, or in what `pip install --target` has filled; and
no program has generated or downloaded it. A path of `user_paths` is the user's wherever it lies. A module that the
configuration names under `follow`, or that `ttprun.frameworks` knows, counts as the user's; its whole package has its
effects muted, since a framework writes its logs and checkpoints from all over its package. So have packages that write
a model for a loop of the script's own (`model.save_pretrained`).

The user's part of the call stack is the frames that are recorded (`user_frames`). Their names are the same in every
rank that runs the same script, so places can be compared between processes (`place`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import functools
import glob
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, TypeVar

import xxhash

from ttprun import frameworks
from ttprun.introspect.safe_reads import module_of_class

_INSTALLED = tuple(
    path.rstrip(os.sep) + os.sep
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        os.path.join(sys.base_prefix, sys.platlibdir, f"python{sys.version_info[0]}{sys.version_info[1]}.zip"),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    }
    if path
)
_SITE = f"{os.sep}site-packages{os.sep}"
_SITES = (_SITE, f"{os.sep}dist-packages{os.sep}")
# Packages that are libraries wherever they lie, in a developer's folder, say; the second not beside a script.
_OF_TORCH = frozenset({"torch", "torch_npu", "torchgen", "functorch"})
LIBRARIES = _OF_TORCH | {name.partition(".")[0] for name in frameworks.FOLLOW}
# Folders for what programs generate or download; so are hidden ones, but for one that the script is in, too. Files
# `_remote_module_*` are what torch before 2.13 writes to a temporary folder when it is imported.
_CACHES = ("HF_HOME", "HF_MODULES_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_OF_CACHES = (".", "torchinductor_", "_remote_module_")
_user_directories: list[str] = []
_own_installed: tuple[str, ...] = ()  # of these, what lies where installed packages do, and single files
_named: set[str] = set(frameworks.FOLLOW)
_libraries: tuple[str, ...] = ()
_seen_before: frozenset[str] | None = None  # files to follow, for the loops that an earlier run has met in them
_followed_files: set[str] = set()
_followed_packages: tuple[str, ...] = ()


class _Answers(dict[str, bool]):
    def __missing__(self, filename: str) -> bool:
        self[filename] = is_script = filename in _followed_files or is_of_user(filename)
        return is_script


ANSWERS = _Answers()  # of `is_script_code`, by file names
_muted: dict[str, bool] = {}


def add_user_directory(path: str) -> None:
    """Files below `path` are the user's from now on."""
    _user_directories.append(os.path.abspath(path).rstrip(os.sep) + os.sep)
    _forget_answers()


def add_named_path(path: str) -> None:
    """A folder or a file that somebody has named is the user's, even if it is an installed package."""
    global _own_installed
    full = os.path.abspath(path)
    add_user_directory(full)
    if is_installed(full) or full.endswith(".py"):
        _own_installed += (full if full.endswith(".py") else full.rstrip(os.sep) + os.sep,)
    _forget_answers()


def note_library(module: str, filename: str) -> None:
    """One of LIBRARIES comes from this file."""
    global _libraries
    folder = os.path.dirname(os.path.abspath(filename)) + os.sep
    if module in _OF_TORCH or not folder.startswith(tuple(_user_directories)):
        _libraries = tuple({*_libraries, folder})
        _forget_answers()


def follow(modules: Iterable[str]) -> None:
    """Modules of these names, and packages with all their modules, count as the user's when they are imported."""
    _named.update(modules)


def follow_files(files: Iterable[str] | None) -> None:
    """Modules from these files are followed, too, when they are imported. None: what a run meets is not remembered."""
    global _seen_before
    _seen_before = None if files is None else frozenset(files)


def is_remembering() -> bool:
    """Whether what this run meets is remembered for the next one."""
    return _seen_before is not None


def is_seen_before(filename: str) -> bool:
    """Whether an earlier run has met a training loop in a file."""
    return _seen_before is not None and filename in _seen_before


def is_named(module: str) -> bool:
    """Whether a module, or a package that it is in, is to be followed by its name."""
    while module and module not in _named:
        module = module.rpartition(".")[0]
    return bool(module)


def note_followed(module: str, filename: str) -> None:
    """A module that is followed by its name comes from this file."""
    global _followed_packages
    if filename in _followed_files:
        return
    _followed_files.add(filename)
    depth = module.count(".") + (os.path.basename(filename) == "__init__.py")
    package = os.path.abspath(filename)
    for _ in range(depth):
        package = os.path.dirname(package)
    if depth:
        _followed_packages = tuple({*_followed_packages, package + os.sep})
    _forget_answers()


def is_state(kind: type) -> bool:
    """Whether a class is defined in a file whose objects are state: its attributes, and all of theirs."""
    filename = getattr(sys.modules.get(module_of_class(kind)), "__file__", None)
    return bool(filename) and is_script_code(str(filename))


def has_muted_effects(filename: str) -> bool:
    """Whether writes, removals and other effects of code from this file are muted in a replay."""
    is_muted = _muted.get(filename)
    if is_muted is None:
        is_of_framework = os.path.abspath(filename).startswith(_followed_packages) or _writes_checkpoints(filename)
        is_muted = _muted[filename] = is_script_code(filename) or is_of_framework
    return is_muted


def _writes_checkpoints(filename: str) -> bool:
    """Whether a file is of an installed package that writes checkpoints for its caller."""
    _, is_installed_there, inside = filename.rpartition(_SITE)
    return bool(is_installed_there) and inside.partition(os.sep)[0] in frameworks.WRITING


def is_installed(path: str) -> bool:
    """Whether a file or folder belongs to an installed package, to torch, or to Python itself."""
    full = os.path.abspath(path) + os.sep
    if full.startswith(_own_installed):
        return False
    return full.startswith(_libraries) or _is_installed_folder(os.path.dirname(full[:-1]) + os.sep) or _is_target(full)


@functools.cache
def _is_installed_folder(folder: str) -> bool:
    real = os.path.realpath(folder) + os.sep
    return _lies_installed(real) or (_lies_installed(folder) and not _is_linked(folder))


def _lies_installed(folder: str) -> bool:
    return folder.startswith(_INSTALLED) or any(site in folder for site in _SITES)


def _is_linked(folder: str) -> bool:
    """Whether a folder is of a package that somebody develops elsewhere: its folder in site-packages is a link."""
    for site in _SITES:
        before, is_there, inside = folder.rpartition(site)
        if is_there and inside:
            return os.path.islink(f"{before}{site}{inside.partition(os.sep)[0]}")
    return False


def _is_target(path: str) -> bool:
    """Whether a file of a folder of sys.path was put there by pip, as by `pip install --target`."""
    for entry in sys.path:
        before = os.path.abspath(entry) + os.sep
        if path.startswith(before) and path.removeprefix(before).partition(os.sep)[0] in _put_by_pip(before):
            return True
    return False


@functools.cache
def _put_by_pip(folder: str) -> frozenset[str]:
    """The names in a folder that are listed in the descriptions of packages beside them."""
    names: set[str] = set()
    for record in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with contextlib.suppress(OSError), open(record, encoding="utf-8", errors="replace") as lines:
            names.update(re.split("[/,]", line, maxsplit=1)[0] for line in lines)
    return frozenset(names)


def is_of_user(filename: str) -> bool:
    """Whether a file is the user's own. Without any directory of the user's being known, none is."""
    path = os.path.abspath(filename)
    if filename.startswith("<") or is_installed(path):
        return False
    if path.startswith(tuple(_user_directories)) or path in _own_installed:
        return True
    return _is_there(path) and not _is_cached(path)


def _is_there(path: str) -> bool:
    """Whether it is a file, or a member of one: code may name a file that was only where it was compiled."""
    folder = path
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.path.isfile(folder)


def _is_cached(path: str) -> bool:
    caches = (os.path.abspath(os.environ[name]) + os.sep for name in _CACHES if os.environ.get(name))
    parts = (os.path.relpath(path, directory).split(os.sep) for directory in _user_directories)
    return path.startswith(tuple(caches)) or not any(
        all(part == os.pardir or not part.startswith(_OF_CACHES) for part in of_one) for of_one in parts
    )


def is_script_code(filename: str) -> bool:
    """Whether a file is the user's, or one of a module that is followed by its name."""
    return ANSWERS[filename]


def _forget_answers() -> None:
    ANSWERS.clear()
    _muted.clear()
    _is_installed_folder.cache_clear()


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
