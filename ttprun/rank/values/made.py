"""Immutable objects of the standard library that are made by calling their type: operator.itemgetter, struct.Struct.

[tag, type, [arguments], {keyword: node}]. A variable may be given another one, so they are made anew where they differ.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable
from typing import Any

from ttprun.rank.values.nodes import MISSING, Tag, name_of, short_name
from ttprun.rank.values.restore import Restore, told
from ttprun.rank.values.snapshot import Snapshot


def _of_getter(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kind, args = value.__reduce__()[:2]
    return (args, kind.keywords) if isinstance(kind, functools.partial) else (args, {})


# How each type tells what it was called with; those of operator.methodcaller come as a partial if they have names.
PARTS: dict[type, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    operator.itemgetter: _of_getter,
    operator.attrgetter: _of_getter,
    operator.methodcaller: lambda value: _of_method(*_of_getter(value), value),
    struct.Struct: lambda value: ((value.format,), {}),
}
_KINDS = {name_of(kind): kind for kind in PARTS}


def _of_method(args: tuple[Any, ...], named: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With keywords the method's name stands with the function, not among the arguments."""
    return ((*value.__reduce__()[0].args, *args), named) if named else (args, {})


def record_made(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """One of exactly these types."""
    args, named = PARTS[type(value)](value)
    return [Tag.MADE, name_of(type(value)), snapshot.items(args, depth), snapshot.attributes(named, depth)]


def restore_made(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """The same one if it was made of the same, else a new one."""
    kind = _KINDS[node[1]]
    old_args, old_named = PARTS[kind](live) if type(live) is kind else ((), {})
    args = restore.items(old_args, node[2], name)
    named = {key: restore.value(old_named.get(key, MISSING), one, f"{name}.{key}") for key, one in node[3].items()}
    if type(live) is kind and restore.snapshot(live) == [Tag.MADE, *node[1:]]:
        return live
    if any(one is MISSING for one in (*args, *named.values())):
        return restore.refuse(live, f"{name} is a {short_name(node[1])} in the lost rank and {told(live)} here")
    return kind(*args, **named)
