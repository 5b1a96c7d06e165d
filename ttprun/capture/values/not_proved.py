"""Objects that can change, and can neither be recorded nor compared: named before a fault and with each incident.

A replacement has such an object as the script's setup has made it. named.py finds the names.
"""

from __future__ import annotations

from typing import Any

from ttprun.capture.records.nodes import EffectNode, NotProvedNode
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.type_names import MISSING, name_of

UNTOLD = "it can change, and does not show its state"


def record_not_proved(snapshot: Snapshot, value: Any, why: str = UNTOLD) -> NotProvedNode:
    """The node of an object of which only the type is known.

    why   completes the variable's name in a sentence: "it is nested too deep"
    """
    kind = name_of(type(value))
    snapshot.not_proved.append(kind)
    return NotProvedNode(kind, why)


def restore_by_type(restore: Restore, live: Any, node: NotProvedNode | EffectNode, name: str) -> Any:
    """Keep what the replay has made, if it has the same type."""
    if isinstance(node, EffectNode) and (live is MISSING or live is None):
        return restore.leave_out(live, node, name)
    if live is MISSING or name_of(type(live)) != node.kind:
        return restore.refuse(live, unlike(name, node.kind, live))
    return live
