"""Call a function when a module has been imported.

Our finder is first on sys.meta_path, asks the later ones for the module, and wraps the loader that they return. It
keeps no state between calls: `importlib.util.find_spec` changes nothing, a failed import can be repeated, and threads
may import at the same time. A module imported another way (by a finder before ours, or by a thread that had begun
already) is noticed at the next import of any module; until then `is_overdue` is True.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ttprun.introspect import signal_handlers

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
