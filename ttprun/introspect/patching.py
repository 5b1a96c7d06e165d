"""Replace functions of other modules by ours, by a table whose rows name both.

If an attribute is missing (another version of torch), that row is left out, which is reported. Begin with
`replace`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

from ttprun.introspect import fail_open

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
