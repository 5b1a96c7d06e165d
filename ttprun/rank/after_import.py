"""To do something when a module has been imported, by whomever."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module.

    name  of the module
    act   called once, when its code has run
    """

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._act()

        loader.exec_module = exec_module
        return spec


def after_import(name: str, act: Callable[[], None]) -> None:
    """Have `act` called when the module has been imported for the first time; nothing if it is waited for already."""
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, act))
