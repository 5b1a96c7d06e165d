"""The parts and tensors of a module, read without its own methods, which a class may override.

Names are those of torch's `named_modules` and `named_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ttprun.introspect.looks import dictionary_of, is_a

_IN_C = ("_modules", "_parameters", "_buffers")


def tables_of(part: torch.nn.Module) -> dict[str, Any]:
    """The attributes that a module itself holds, among them `_modules`, `_parameters` and `_buffers`.

    One that torch.jit has compiled keeps those three in C++, and what it answers about them is a copy.
    """
    held = dictionary_of(part) or {}
    if not is_a(part, torch.jit.ScriptModule):
        return held
    held = dictionary_of(held.get("_actual_script_module", part)) or {}  # a traced one is a shell around it
    return held | {name: dict(held[name].items()) for name in _IN_C if name in held}


def parts_of(root: torch.nn.Module, with_repeated: bool = False) -> Iterator[tuple[str, torch.nn.Module]]:
    """(path, module) of a module and all inside it.

    with_repeated   one that is there several times comes each time
    """
    met: set[int] = set()
    left = [("", root)]
    while left:
        path, part = left.pop()
        if id(part) in met and not with_repeated:
            continue
        met.add(id(part))
        yield path, part
        inner = tables_of(part).get("_modules", {})
        within = [(f"{path}.{name}" if path else name, one) for name, one in inner.items() if one is not None]
        left += reversed(within)


def parameters_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of all of a module's; one that is there several times comes once."""
    met: set[int] = set()
    for path, part in parts_of(root):
        for name, one in tables_of(part).get("_parameters", {}).items():
            if one is not None and id(one) not in met:
                met.add(id(one))
                yield f"{path}.{name}" if path else name, one
