"""What a rank has imported, in its order, and what the script did to the environment in between: for the standby.

A module sees the environment as it is when its code runs. The standby imports the same modules in the same order, so it
needs to know between which imports the script has changed a variable: the finder that takes the user's modules is asked
at each import, and looks here first.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ttprun.rank.position.whose import is_installed

# What each Python runs by itself.
_AT_START = frozenset({"__main__", "sitecustomize", "usercustomize"})
_environment: Any = os.environ
_seen: dict[bytes, bytes] = {}
_changes: dict[str, dict[str, str | None]] = {}


def begin() -> None:
    """The rank has the environment that it was started with."""
    global _seen
    _seen = dict(_environment._data)
    _changes.clear()


def note_environment(importing: str) -> None:
    """A module is about to be looked for: note what has changed in the environment since the last one was."""
    global _seen
    now = _environment._data
    if now == _seen:
        return
    changed = {key for key in now.keys() | _seen.keys() if now.get(key) != _seen.get(key)}
    of_module = _changes.setdefault(importing, {})
    for key in changed:
        value = now.get(key)
        of_module[os.fsdecode(key)] = None if value is None else os.fsdecode(value)
    _seen = dict(now)


def modules() -> list[tuple[str, str, dict[str, str | None]]]:
    """(name, file, changes of the environment before it) of all modules but torch's and ours, in their order.

    The file is "" for what a standby must not import: the user's own, and what has no name of its own.
    """
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "ttprun"):
            found.append((name, _file_of(name, module), _changes.get(name, {})))
    names = set(sys.modules)
    lost = [change for name, change in _changes.items() if name not in names]  # of imports that have failed
    return [("", "", change) for change in lost] + found


def _file_of(name: str, module: Any) -> str:
    """Where an installed module comes from; "" for any other."""
    spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None  # a lazy one is not asked
    if type(spec) is not ModuleSpec or spec.name != name or name in _AT_START:
        return ""
    origin = spec.origin
    if origin in ("built-in", "frozen"):
        return str(origin)
    if isinstance(origin, str):
        return origin if is_installed(origin) else ""
    places = list(spec.submodule_search_locations or ())
    return os.pathsep.join(places) if places and all(map(is_installed, places)) else ""
