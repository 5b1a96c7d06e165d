"""Applies the table of patches (`patch_table.py`).

The rows are applied as soon as the script has imported torch, never by importing torch ourselves. If an attribute is
missing (another version of torch), that protection is off, and this is reported once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from ttprun.introspect import fail_open
from ttprun.introspect.after_import import after_import
from ttprun.rank.bootstrap.patch_table import PATCHES, Patch

_made: dict[tuple[int, str], Any] = {}
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


def apply_all(with_replay: bool) -> list[str]:
    """Apply what a rank needs after torch is imported; returns the attributes that this version of torch lacks."""
    _follow_imports()
    return _apply("first", "early", "script", "always", *(["replay"] if with_replay else []))


def apply_early(is_mindio: bool) -> list[str]:
    """Apply what must be in place before the script starts; returns what is missing."""
    return _apply("first", *([] if is_mindio else ["early"]))


def apply_for_frameworks() -> list[str]:
    """Apply what a rank with --mindio needs, where nothing is recorded or replayed; returns what is missing."""
    _follow_imports()
    return _apply("first", "always", "mindio")


def _follow_imports() -> None:
    for module in {patch.module for patch in PATCHES if patch.where == "imported"}:
        after_import(module, functools.partial(_apply_to, module))


def _apply_to(module: str) -> None:
    # What is missing is not reported here: who needs it finds it missing, and says so.
    _replace(patch for patch in PATCHES if patch.where == "imported" and patch.module == module)


def _apply(*wheres: str) -> list[str]:
    return _replace(patch for patch in PATCHES if patch.where in wheres)


def _replace(patches: Iterable[Patch]) -> list[str]:
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
        for held, value in list(names.items()):
            known = changed.get(id(value))
            if known is not None and known[0] in (package, "torch"):
                names[held] = known[1]
