"""What replicas have alike in their records of a boundary: a lost rank's must be those of the rank that repairs it."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot

_NAMES = ("weights", "held", "stepped")


def of(node: Node, slot: RankSlot, boundary: int) -> str:
    """A hash of a rank's marks; "" if it has left no record of the boundary."""
    if not slot.is_here:
        return slot.marks.get(boundary, "")
    record = node.recorded(slot, boundary)
    if not record:
        return ""
    return hashlib.sha256(msgpack.packb([_ordered(record.get(name)) for name in _NAMES])).hexdigest()


def _ordered(value: Any) -> Any:
    """The same for equal values: what a dict holds in an order of its own."""
    if isinstance(value, dict):
        return sorted(([_ordered(key), _ordered(one)] for key, one in value.items()), key=repr)
    return [_ordered(one) for one in value] if isinstance(value, list | tuple) else value
