"""Which code counts as the user's, in four separate questions:

whose loops are followed      `follows_loops`
whose frames are recorded     `records_frames`
whose objects are state       `holds_state`, `is_state`
whose effects are muted       `has_muted_effects`

A file is the user's if it is the script, or below the script's directory or a directory of `user_paths`, and not an
installed package, unless `user_paths` names that itself. All four are true for it. A module that the configuration
names under `follow`, or that `ttprun.frameworks` knows, counts as the user's for the first three; its whole package has
its effects muted, since a framework writes its logs and checkpoints from all over its package. So have packages that
write a model for a loop of the script's own (`model.save_pretrained`).
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable

from ttprun import frameworks

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
_SITE = f"{os.sep}site-packages{os.sep}"
_user_directories: list[str] = []
_own_installed: tuple[str, ...] = ()  # of these, what lies where installed packages do, and single files
_named: set[str] = set(frameworks.FOLLOW)
_followed_files: set[str] = set()
_followed_packages: tuple[str, ...] = ()
_known: dict[str, bool] = {}
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


def follow(modules: Iterable[str]) -> None:
    """Modules of these names, and packages with all their modules, count as the user's when they are imported."""
    _named.update(modules)


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


def follows_loops(filename: str) -> bool:
    """Whether the `for` loops of code from this file are followed."""
    return _is_theirs(filename)


def records_frames(filename: str) -> bool:
    """Whether frames that run code from this file are recorded, and are part of a place in the script."""
    return _is_theirs(filename)


def holds_state(filename: str) -> bool:
    """Whether functions and generators from this file are state: their closures, attributes and variables."""
    return _is_theirs(filename)


def is_state(kind: type) -> bool:
    """Whether a class is defined in a file whose objects are state: its attributes, and all of theirs."""
    filename = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(filename) and holds_state(str(filename))


def has_muted_effects(filename: str) -> bool:
    """Whether writes, removals and other effects of code from this file are muted in a replay."""
    known = _muted.get(filename)
    if known is None:
        is_of_framework = os.path.abspath(filename).startswith(_followed_packages) or _writes_checkpoints(filename)
        known = _muted[filename] = _is_theirs(filename) or is_of_framework
    return known


def _writes_checkpoints(filename: str) -> bool:
    """Whether a file is of an installed package that writes checkpoints for its caller."""
    _, is_installed_there, inside = filename.rpartition(_SITE)
    return bool(is_installed_there) and inside.partition(os.sep)[0] in frameworks.WRITING


def is_installed(path: str) -> bool:
    """Whether a file or folder belongs to an installed package, or to Python itself."""
    full = os.path.abspath(path) + os.sep
    if full.startswith(_own_installed):
        return False
    return full.startswith(_INSTALLED) or _SITE in full


def is_of_user(filename: str) -> bool:
    """Whether a file is the user's own."""
    path = os.path.abspath(filename)
    is_below = path.startswith(tuple(_user_directories)) or path in _own_installed
    return not filename.startswith("<") and is_below and not is_installed(path)


def _is_theirs(filename: str) -> bool:
    """Whether a file is the user's, or one of a module that is followed by its name."""
    known = _known.get(filename)
    if known is None:
        known = _known[filename] = filename in _followed_files or is_of_user(filename)
    return known


def _forget_answers() -> None:
    _known.clear()
    _muted.clear()
