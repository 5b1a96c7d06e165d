"""What can change, is in no record, and cannot be compared: it is named, before a fault and with each incident.

A replacement has such an object as the script's set-up has made it. Its node says so: [tag, type, why]. named.py finds
the names.
"""

from __future__ import annotations

from typing import Any

from ttprun.rank.values.nodes import MISSING, Tag, name_of, short_name
from ttprun.rank.values.restore import Restore, told
from ttprun.rank.values.snapshot import Snapshot

UNTOLD = "it can change, and tells nothing of its state"


def record_not_proved(snapshot: Snapshot, value: Any, why: str = UNTOLD) -> list[Any]:
    """The node of an object of which nothing is known but its type."""
    kind = name_of(type(value))
    snapshot.not_proved.append(kind)
    return [Tag.NOT_PROVED, kind, why]


def restore_not_proved(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """What the replay has made stays, if it is of the same type."""
    if live is MISSING or name_of(type(live)) != node[1]:
        return restore.refuse(
            live, f"{name} is a {short_name(node[1])} in the lost rank, cannot be recorded, and is {told(live)} here"
        )
    return live
