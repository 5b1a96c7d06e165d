"""Containers that hold their keys or values weakly: what lives of them is recorded, in order.

[tag, number, type, keys, values]; a WeakSet has no values. The objects themselves are told like any others. Which of
those in a set is which can only be told where they have been met already; else their types are compared.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.utils.weak

from ttprun.rank.values.nodes import Tag, name_of, short_name
from ttprun.rank.values.restore import Restore, told
from ttprun.rank.values.snapshot import Snapshot

WEAK: tuple[Any, ...] = (
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    torch.utils.weak.WeakIdKeyDictionary,
)


def record_weak(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """One of exactly these types."""
    kind = name_of(type(value))
    if type(value) is not weakref.WeakSet:
        number = snapshot.number(value)
        items = list(value.items())
        keys, values = (snapshot.items([item[at] for item in items], depth) for at in (0, 1))
        return [Tag.WEAK, number, kind, keys, values]
    held = list(value)
    if all(isinstance(item, type) or id(item) in snapshot.numbers for item in held):
        return [Tag.WEAK, snapshot.number(value), kind, snapshot.items(held, depth), []]
    kinds = sorted(name_of(type(item)) for item in held)
    return [Tag.SAME, kind, f"{len(kinds)} of {', '.join(kinds)}"]


def restore_weak(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """In place, in the order of the lost rank."""
    _, number, kind, key_nodes, value_nodes = node
    if name_of(type(live)) != kind:
        return restore.refuse(live, f"{name} is a {short_name(kind)} in the lost rank and {told(live)} here")
    if not restore.claim_or_refuse(number, live, name):
        return live
    is_set = isinstance(live, weakref.WeakSet)
    have = [] if is_set else list(live.items())
    old = [*zip(*have, strict=True)] if have else [(), ()]
    keys, values = (restore.items(old[at], nodes, name) for at, nodes in enumerate((key_nodes, value_nodes)))
    if is_set:
        live.clear()
        live.update(keys)
    elif len(keys) == len(values):  # on the way to the boundary some may not be here yet
        live.clear()
        live.update(zip(keys, values, strict=True))
    return live
