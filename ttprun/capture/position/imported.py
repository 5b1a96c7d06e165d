"""The modules that a rank has imported, in order, and the script's changes of the environment in between.

A module sees the environment at the time of its import. The standby imports the same modules in the same order, so it
must know between which imports the script has changed a variable: the finder of the user's modules is called at each
import, and notes that here.
"""

from __future__ import annotations

import os
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ttprun.frameworks import DRAWING
from ttprun.introspect.whose import is_installed

# Run by each Python by itself.
_AT_START = frozenset({"__main__", "sitecustomize", "usercustomize"})
_environment: Any = os.environ
_seen: dict[bytes, bytes] = {}
_changes: dict[str, dict[str, str | None]] = {}
_random: Any = None
_drawing_later: set[str] = set()  # modules that draw at import, imported after something else had drawn, or a seed


def begin() -> None:
    """Begin with the environment of the rank's start."""
    global _seen, _random
    _seen = dict(_environment._data)
    _changes.clear()
    _drawing_later.clear()
    _random = random.getstate()


def note_environment(importing: str) -> None:
    """Before a module is searched for: note what has changed in the environment since the previous one."""
    global _seen
    if importing in DRAWING and random.getstate() != _random:
        _drawing_later.add(importing)
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

    The file is "" for what a standby must not import: the user's own, what has no name of its own, and what draws
    other random numbers than it would at the start of a rank.
    """
    rows = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "ttprun"):
            file = "" if name in _drawing_later else _file_of(name, module)
            rows.append((name, file, _changes.get(name, {})))
    names = set(sys.modules)
    lost = [change for name, change in _changes.items() if name not in names]  # of imports that have failed
    return [("", "", change) for change in lost] + rows


def _file_of(name: str, module: Any) -> str:
    """The origin of an installed module; "" for any other."""
    spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None  # do not load a lazy one
    if type(spec) is not ModuleSpec or spec.name != name or name in _AT_START:
        return ""
    origin = spec.origin
    if origin in ("built-in", "frozen"):
        return str(origin)
    if isinstance(origin, str):
        return origin if is_installed(origin) else ""
    places = list(spec.submodule_search_locations or ())
    return os.pathsep.join(places) if places and all(map(is_installed, places)) else ""
