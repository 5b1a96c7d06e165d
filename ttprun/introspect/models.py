"""All parameters of an optimizer, also while it is shown a part of them.

An engine may step one parameter group after another: it puts a shorter list in the place of `param_groups`, as
DeepSpeed's ZeRO 1 and 2 do, or gives a group its parameters for the time of the step alone, as ZeRO 3 does. What is not
shown at the moment is state all the same: it is learnt, and shown again. Begin with `all_of`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ttprun.introspect.safe_reads import dictionary_of, is_a

# The parts and tensors of a module, read without its own methods, which a class may override.
#
# Names are those of torch's `named_modules` and `named_parameters`.


_IN_C = ("_modules", "_parameters", "_buffers")


def tables_of(part: torch.nn.Module) -> dict[str, Any]:
    """The attributes that a module itself holds, among them `_modules`, `_parameters` and `_buffers`.

    One that torch.jit has compiled keeps those three in C++, and what it answers about them is a copy.
    """
    attributes = dictionary_of(part) or {}
    if not is_a(part, torch.jit.ScriptModule):
        return attributes
    attributes = dictionary_of(attributes.get("_actual_script_module", part)) or {}  # a traced one is a shell around it
    return attributes | {name: dict(attributes[name].items()) for name in _IN_C if name in attributes}


def parts_of(root: torch.nn.Module, with_repeated: bool = False) -> Iterator[tuple[str, torch.nn.Module]]:
    """(path, module) of a module and all inside it.

    with_repeated   one that is there several times comes each time
    """
    met: set[int] = set()
    pending = [("", root)]
    while pending:
        path, part = pending.pop()
        if id(part) in met and not with_repeated:
            continue
        met.add(id(part))
        yield path, part
        inner = tables_of(part).get("_modules", {})
        within = [(f"{path}.{name}" if path else name, child) for name, child in inner.items() if child is not None]
        pending += reversed(within)


def parameters_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of all of a module's; one that is there several times comes once."""
    met: set[int] = set()
    for path, part in parts_of(root):
        for name, parameter in tables_of(part).get("_parameters", {}).items():
            if parameter is not None and id(parameter) not in met:
                met.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


class Group(NamedTuple):
    """A parameter group.

    settings     its dict, as in `param_groups`
    parameters   all that belong to it
    """

    settings: dict[str, Any]
    parameters: list[torch.Tensor]


class _Known:
    """What an optimizer was seen with.

    dicts   the list that was its `param_groups` when it was shown all
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.dicts = optimizer.param_groups
        self.groups = [Group(settings, settings["params"]) for settings in self.dicts]

    def is_shown(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is shown just this; plain loops, as it is asked at each boundary."""
        dicts = optimizer.param_groups
        if dicts is not self.dicts or len(dicts) != len(self.groups):
            return False
        for settings, group in zip(dicts, self.groups, strict=True):
            if settings is not group.settings or settings["params"] is not group.parameters:
                return False
        return True

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is shown something else than before: a part, or more."""
        ids = set(map(id, self.dicts))
        shown = optimizer.param_groups
        if len(shown) >= len(self.dicts) or any(id(settings) not in ids for settings in shown):
            self.dicts = shown
        before = {id(group.settings): group.parameters for group in self.groups}
        state = optimizer.state
        self.groups = [
            Group(settings, _joined(before.get(id(settings), []), settings["params"], state)) for settings in self.dicts
        ]


def _joined(earlier: list[torch.Tensor], shown: list[torch.Tensor], state: Any) -> list[torch.Tensor]:
    """The parameters of a group: those shown, and of the known ones those that have not been given up."""
    if shown is earlier or not shown:
        return earlier
    ids, ids_earlier = set(map(id, shown)), set(map(id, earlier))
    if ids & ids_earlier and ids - ids_earlier:  # the list was edited
        return shown
    hidden = [parameter for parameter in earlier if id(parameter) not in ids and parameter in state]
    if not hidden:
        return shown
    kept = set(map(id, hidden)) | ids
    return [
        *(parameter for parameter in earlier if id(parameter) in kept),
        *(parameter for parameter in shown if id(parameter) not in ids_earlier),
    ]


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def shown_to(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that it would step now."""
    for group in optimizer.param_groups:
        yield from group["params"]


def how_many_shown(optimizer: torch.optim.Optimizer) -> list[int | None]:
    """Of each group of `all_of`, how many parameters are shown; None: the group itself is not."""
    shown = {id(group): len(group["params"]) for group in optimizer.param_groups}
    return [shown.get(id(group.settings)) for group in all_of(optimizer)]


def all_of(optimizer: torch.optim.Optimizer) -> list[Group]:
    """All groups of an optimizer, the same list for as long as it is shown the same.

    A group that is not shown keeps its place among those that are. A group that shows none of its parameters, or some
    of them, or others, keeps those of which the optimizer has state; if it shows none, all.
    """
    entry = _known.get(optimizer)
    if entry is None:
        entry = _known[optimizer] = _Known(optimizer)
    elif not entry.is_shown(optimizer):
        entry.look(optimizer)
    return entry.groups
