"""The names of what is not proved, as `ttprun status` shows them. Begin with `names_of`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ttprun.rank.values.nodes import Tag, unpack
from ttprun.rank.values.snapshot import Snapshot
from ttprun.rank.values.trees import Part, listed, shape_of

_MOST_NAMES = 20
_MOST_LETTERS = 100
_known: tuple[list[str], list[str]] = ([], [])


def forget() -> None:
    """The run of the script is over."""
    global _known
    _known = ([], [])


def names_of(snapshot: Snapshot, scopes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What of these variables is not proved: "cache (sqlite3.Connection): it is in a file", in their order.

    snapshot   that has made the nodes
    scopes     by where they are ("train" for a function, "" for the script itself), nodes by variable
    """
    global _known
    if not snapshot.not_proved:
        return []
    if snapshot.not_proved != _known[0]:
        found = [
            told_node
            for where, scope in scopes.items()
            for name, node in scope.items()
            for told_node in _named(node, f"{where}: {name}" if where else name)
        ]
        _known = (snapshot.not_proved, list(dict.fromkeys(found))[:_MOST_NAMES])
    return _known[1]


def _named(node: Any, name: str) -> Iterable[str]:
    """The names below one node, by a walk of its own: the script's objects may be nested deeply."""
    left = [(node, name)]
    while left:
        node, name = left.pop()
        if node.__class__ is not list:
            continue
        if node[0] == Tag.NOT_PROVED:
            name = name if len(name) <= _MOST_LETTERS else f"{name[:40]}...{name[-40:]}"
            yield f"{name} ({node[1].removeprefix('builtins:').replace(':', '.')}): {node[2]}"
        left += reversed(list(_parts(node, name)))


def _parts(node: list[Any], name: str) -> Iterable[tuple[Any, str]]:
    if node[0] == Tag.DEEP:
        yield unpack(node[1]), name
        return
    if node[0] == Tag.DICT:
        keys, values = map(listed, node[2:4])
        yield from ((value, f"{name}[{_told_key(key)}]") for key, value in zip(keys, values, strict=True))
        return
    if node[0] == Tag.MODULE and node[6] is None:
        for path, nodes in node[4].items():
            yield from ((one, f"{name}.{path}.{key}" if path else f"{name}.{key}") for key, one in nodes.items())
        return
    for at, part in shape_of(node).items():
        if at >= len(node) or part is Part.NUMBER:
            continue
        if part is Part.NODE:
            yield node[at], name
        elif part is Part.NAMED:
            yield from ((one, f"{name}.{key}") for key, one in node[at].items())
        elif part is Part.GROUPS:
            yield from ((one, f"{name}.{key}") for group in node[at] for key, one in group.items())
        elif isinstance(node[at], list):  # what is packed holds nothing of the kind
            yield from ((one, f"{name}[{index}]") for index, one in enumerate(node[at]))


def _told_key(key: Any) -> str:
    return repr(key) if key.__class__ is not list else "..."
