"""Optimizers: hyper-parameters, and what a class of the user's keeps beside them. Their state comes from a peer."""

from __future__ import annotations

from typing import Any

import torch

from ttprun.capture.records.nodes import OptimizerNode
from ttprun.capture.values.objects import restore_attributes
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.type_names import MISSING, name_of
from ttprun.introspect.models import all_of, how_many_shown

_PARAMS = frozenset({"params"})


class _Empty(torch.optim.SGD):
    """An optimizer of nothing: to add a group would import Dynamo, which takes a second."""

    def add_param_group(self, param_group: dict[str, Any]) -> None: ...


# What torch itself keeps in an optimizer; `step` is there if a scheduler has wrapped it.
_INTERNALS = frozenset(vars(_Empty([torch.zeros(1)], lr=0.1))) | {"step", "_opt_called", "_step_count"}


def record_optimizer(snapshot: Snapshot, value: torch.optim.Optimizer, depth: int) -> Any:
    """Hyper-parameters of each group, and attributes."""
    scope = vars(value)
    names = snapshot.names_of(scope, _INTERNALS)
    number = snapshot.number(value)
    settings = [group.settings for group in all_of(value)]
    groups = [snapshot.lasting_attributes(snapshot.names_of(group, _PARAMS), group, depth) for group in settings]
    own = snapshot.lasting_attributes(names, scope, depth)
    return OptimizerNode(number, name_of(type(value)), groups, how_many_shown(value), own)


def restore_optimizer(restore: Restore, live: Any, node: OptimizerNode, name: str) -> Any:
    """Write them into the replacement's optimizer."""
    groups = [group.settings for group in all_of(live)]
    if name_of(type(live)) != node.kind or len(groups) != len(node.groups) or how_many_shown(live) != node.shown:
        return restore.refuse(live, f"{name} is another optimizer than in the lost rank")
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    for group, recorded in zip(groups, node.groups, strict=True):
        for key, item in recorded.items():
            value = restore.value(group.get(key, MISSING), item, f"{name}.param_groups.{key}")
            if value is not MISSING:
                group[key] = value
        for key in group.keys() - recorded.keys() - _PARAMS:
            del group[key]
    restore_attributes(restore, live, node.attributes, name, keep=_INTERNALS)
    return live
