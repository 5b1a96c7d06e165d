"""Which code counts as the user's: its loops are followed, its frames are recorded and its objects are state
(`is_script_code`), and its effects are muted in a replay (`has_muted_effects`).

A file is the user's if it is not installed: it lies neither in `site-packages` or `dist-packages` (but for a folder
that is linked there), nor in Python's library, in torch, in ttprun, or in what `pip install --target` has filled; and
no program has generated or downloaded it. A path of `user_paths` is the user's wherever it lies. A module that the
configuration names under `follow`, or that `ttprun.frameworks` knows, counts as the user's; its whole package has its
effects muted, since a framework writes its logs and checkpoints from all over its package. So have packages that write
a model for a loop of the script's own (`model.save_pretrained`).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import sys
import sysconfig
from collections.abc import Iterable

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
_left_out: set[str] = set()  # files whose code runs the script


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


def leave_out(filename: str) -> None:
    """Code of this file runs the script, and is no part of it."""
    _left_out.add(filename)
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
    if filename.startswith("<") or filename in _left_out or is_installed(path):
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
