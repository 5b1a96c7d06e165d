"""Replace functions of other modules by ours, by a table whose rows name both; some only when a module is imported.

If an attribute is missing (another version of torch), that row is left out, which is reported. Begin with `replace`,
and with `after_import`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Literal

from ttprun.introspect import fail_open, signal_handlers

# Call a function when a module has been imported.
#
# Our finder is first on sys.meta_path, asks the later ones for the module, and wraps the loader that they return. It
# keeps no state between calls: `importlib.util.find_spec` changes nothing, a failed import can be repeated, and
# threads may import at the same time. A module imported another way (by a finder before ours, or by a thread that had
# begun already) is noticed at the next import of any module; until then `is_overdue` is True.

_waiting: dict[str, Callable[[], None]] = {}
_running: list[str] = []  # modules whose code is running, by a loader that we have wrapped
_lock = threading.Lock()


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the modules that are waited for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for name in list(_waiting):
            if name in sys.modules and is_overdue(name):
                _act_for(name)
        if fullname not in _waiting:
            return None
        finders = sys.meta_path
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                _wrap(spec.loader, fullname)
                return spec
        return None


def _wrap(loader: Any, name: str) -> None:
    run = getattr(loader, "exec_module", None)
    if run is None or isinstance(loader, type) or isinstance(run, functools.partial):  # a class is many modules' loader
        return
    with contextlib.suppress(AttributeError):  # one with slots: then it becomes overdue
        loader.exec_module = functools.partial(_run_and_act, run, name)


def _run_and_act(run: Callable[[ModuleType], None], name: str, module: ModuleType) -> None:
    _running.append(name)
    try:
        run(module)
    finally:
        _running.remove(name)
    if sys.modules.get(name) is module:
        _act_for(name)


@signal_handlers.gate
def _act_for(name: str) -> None:
    with _lock:
        act = _waiting.pop(name, None)
    if act is not None:
        act()


def is_imported(name: str) -> bool:
    """Whether a module is there and its code has run to the end, as far as can be seen."""
    module = sys.modules.get(name)
    if module is None or name in _running or type(module).__name__ == "_LazyModule":  # of importlib.util.LazyLoader
        return False
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


def is_overdue(name: str) -> bool:
    """Whether a module is imported and its function has not been called."""
    return name in _waiting and is_imported(name)


def after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` once when the module is imported, at once if it is; ignored if the module is waited for already.

    act   raises nothing: it is called inside the user's import
    """
    with _lock:
        _waiting.setdefault(name, act)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    if is_imported(name):
        _act_for(name)


_made: dict[tuple[int, str], Any] = {}


@dataclass(frozen=True)
class Patch:
    """One change.

    module, attribute  what is changed ("a.b" for a class's method)
    ours               "module:function" in ttprun; given the original, it returns the replacement
    why                one phrase
    where              "script"  once the script has imported torch
                       "replay"  the same, only before a replay
                       "early"   before the script starts
                       "first"   the same, and with --mindio too
                       "mindio"  only where a framework recovers by callbacks (--mindio) and no script is replayed
                       "always"  as "script", and with --mindio too
                       "imported"  the same, once the script has imported this module, whose import costs seconds
    """

    module: str
    attribute: str
    ours: str
    why: str
    where: Literal["script", "replay", "early", "first", "mindio", "always", "imported"] = "script"


_applied: set[Patch] = set()


def replacement_for(patch: Patch, original: Any) -> Any:
    """Our function, which falls back to the original if ours fails; its `__wrapped__` is the original."""
    made = _made.get((id(original), patch.ours))
    if made is not None:
        return made  # `open is io.open`
    module, _, name = patch.ours.partition(":")
    wrap: Callable[[Any], Any] = getattr(importlib.import_module(f"ttprun.{module}"), name)
    ours = fail_open.guard(f"{patch.module}.{patch.attribute}", original, wrap)
    for attribute in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(original, attribute):
            setattr(ours, attribute, getattr(original, attribute))
    if isinstance(original, FunctionType) and not hasattr(original, "__wrapped__"):
        # `inspect.getfullargspec` does not ask what is wrapped. Of a function that is a wrapper itself it shows that
        # one's `*args, **kwargs`, which ours has, too; `inspect.signature` shows what is wrapped.
        ours.__signature__ = inspect.signature(original)
    ours.__wrapped__ = original  # which stays alive, and so its id
    _made[id(original), patch.ours] = ours
    return ours


def replace(patches: Iterable[Patch]) -> list[str]:
    """Apply these rows, each once per process; returns the attributes that are missing."""
    missing = []
    changed: dict[int, tuple[str, Any]] = {}
    for patch in patches:
        if patch in _applied:
            continue
        _applied.add(patch)
        *path, name = patch.attribute.split(".")
        try:
            owner: Any = importlib.import_module(patch.module)
            for part in path:
                owner = getattr(owner, part)
            original = getattr(owner, name)
        except (ImportError, AttributeError):
            missing.append(f"{patch.module}.{patch.attribute}")
            continue
        ours = replacement_for(patch, original)
        setattr(owner, name, ours)
        if not path:
            changed[id(original)] = (patch.module.partition(".")[0], ours)
    if changed:
        _replace_imported_names(changed)
    return missing


def _replace_imported_names(changed: dict[int, tuple[str, Any]]) -> None:
    """Replace functions under their other names too, e.g. torch.distributed.init_process_group.

    A package that was imported with torch, or before our hooks, may hold one already.

    changed   by the id of the original: (its package, ours); outside its package only functions of torch are replaced
    """
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        names = getattr(module, "__dict__", None)
        if package == "ttprun" or type(names) is not dict:
            continue
        for alias, value in list(names.items()):
            change = changed.get(id(value))
            if change is not None and change[0] in (package, "torch"):
                names[alias] = change[1]
