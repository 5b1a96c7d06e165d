"""Objects that can change, and can neither be recorded nor compared: named before a fault and with each incident.

A replacement has such an object as the script's setup has made it. Its node is [tag, type, why]; named.py finds the
names.
"""

from __future__ import annotations

from typing import Any

from ttprun.rank.values.nodes import MISSING, Tag, name_of
from ttprun.rank.values.restore import Restore, unlike
from ttprun.rank.values.snapshot import Snapshot

UNTOLD = "it can change, and does not show its state"


def record_not_proved(snapshot: Snapshot, value: Any, why: str = UNTOLD) -> list[Any]:
    """The node of an object of which only the type is known.

    why   completes the variable's name in a sentence: "it is nested too deep"
    """
    kind = name_of(type(value))
    snapshot.not_proved.append(kind)
    return [Tag.NOT_PROVED, kind, why]


def restore_not_proved(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """Keep what the replay has made, if it has the same type."""
    if live is MISSING or name_of(type(live)) != node[1]:
        return restore.refuse(live, unlike(name, node[1], live))
    return live
