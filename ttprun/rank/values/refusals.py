"""The variables of a record that cannot be restored, by name: a replay that comes to its boundary refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ttprun.rank.values.nodes import Tag, unpack
from ttprun.rank.values.snapshot import FIXED
from ttprun.rank.values.trees import Part, is_node, listed, shape_of

_KEYS, _VALUES = 2, 3  # of a dictionary's node
MARK_OF_REFUSED = b"\x92\xa1!"  # a REFUSED node as `nodes.pack` packs it; a str of the user's may look alike


def refusals(head: bytes) -> list[str]:
    """A sentence for each value that cannot be restored.

    head   a record, packed
    """
    record = unpack(head)
    found: list[str] = []
    for place, scope in zip(record["place"], record["variables"], strict=False):
        found += _in_scope(scope, f"{place[1]}: ")
    for name, scope in record["modules"].items():
        found += _in_scope(scope, f"{name}: ")
    for at, loop in enumerate(loop for of_frame in record["loops"] for loop in of_frame):
        found += _below(loop["over"], f"what loop {at + 1} around the step runs over")
    return list(dict.fromkeys(found))


def _in_scope(scope: dict[str, Any], where: str) -> Iterator[str]:
    nodes = dict(scope)
    nodes.update(unpack(nodes.pop(FIXED)) if FIXED in nodes else {})
    for name, node in nodes.items():
        yield from _below(node, f"{where}{name}")


def _below(node: Any, name: str) -> Iterator[str]:
    waiting = [(node, name)]
    while waiting:
        node, name = waiting.pop()
        if not is_node(node) or not node:
            continue
        if node[0] == Tag.REFUSED:
            yield f"{name} cannot be recorded: it {node[1]}"
            continue
        for at, part in shape_of(node).items():
            if at >= len(node) or part is Part.NUMBER:
                continue
            if part is Part.NAMED:
                waiting += [(below, f"{name}.{attribute}") for attribute, below in node[at].items()]
            elif part is Part.NODE:
                waiting.append((node[at], name))
            elif part is Part.GROUPS:
                waiting += [(below, f"{name}.{key}") for group in node[at] for key, below in group.items()]
            elif node[0] == Tag.DICT and at == _VALUES:
                waiting += zip(listed(node[at]), (f"{name}[{key!r}]" for key in listed(node[_KEYS])), strict=False)
            else:
                waiting += [(below, f"{name}[{index}]") for index, below in enumerate(listed(node[at]))]
