"""Objects with attributes whose type, or a base of it, is compiled: a part of their state is no attribute.

A subclass in Python of an extension's type is one, and so is a type of an extension's that gives its objects a
dictionary. The attributes are recorded as any object's. What the compiled part holds is compared by what the object
would give to pickle, or named as not proved: [tag, node of the attributes, node of the rest].
"""

from __future__ import annotations

from typing import Any

from ttprun.rank.values.nodes import MISSING, Tag, name_of, short_name
from ttprun.rank.values.objects import record_object
from ttprun.rank.values.process_local import record_unknown
from ttprun.rank.values.restore import Restore, told
from ttprun.rank.values.snapshot import Snapshot


def record_partly_compiled(snapshot: Snapshot, value: Any, depth: int) -> list[Any]:
    """An object that holds more than its attributes, and has no pair of methods for it."""
    return [Tag.PARTLY_COMPILED, record_object(snapshot, value, depth), record_unknown(snapshot, value, depth)]


def restore_partly_compiled(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """Write the attributes; then the rest must be as in the lost rank, if that is known."""
    _, attributes, rest = node
    live = restore.value(live, attributes, name)
    if live is MISSING or rest[0] == Tag.NOT_PROVED or not restore.is_comparing:
        return live
    mine = restore.snapshot(live)
    if mine[0] != Tag.PARTLY_COMPILED or mine[2] != rest:
        return restore.refuse(
            live,
            f"{name}, a {short_name(name_of(type(live)))}, is not as in the lost rank: what {told(live)} has from a "
            "compiled base cannot be recorded",
        )
    return live
