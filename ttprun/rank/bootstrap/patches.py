"""Applies the table of patches (`patch_table.py`).

The rows are applied as soon as the script has imported torch, never by importing torch ourselves. If an attribute is
missing (another version of torch), that protection is off, and this is reported once.
"""

from __future__ import annotations

import functools

from ttprun.introspect.after_import import after_import
from ttprun.introspect.patching import replace
from ttprun.rank.bootstrap.patch_table import PATCHES


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
    replace(patch for patch in PATCHES if patch.where == "imported" and patch.module == module)


def _apply(*wheres: str) -> list[str]:
    return replace(patch for patch in PATCHES if patch.where in wheres)
