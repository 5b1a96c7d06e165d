"""The variables of a record that cannot be restored, by name."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from ttprun.rank.values.nodes import Tag, unpack
from ttprun.rank.values.trees import walk, with_fixed

MARK_OF_REFUSED = b"\x92\xa1!"  # a REFUSED node as `nodes.pack` packs it; a str of the user's may look alike


def refusals(head: bytes) -> list[str]:
    """A sentence for each value that cannot be restored.

    head   a record, packed
    """
    record = unpack(head)
    found: list[str] = []
    for place, scope, dead in zip(record["place"], record["variables"], record["dead"], strict=True):
        found += _in_scope(scope, f"{place[1]}: ", dead)
    for name, scope in record["modules"].items():
        found += _in_scope(scope, f"{name}: ")
    return list(dict.fromkeys([*found, *refused_loops(record)]))


def refused_loops(record: dict[str, Any]) -> list[str]:
    """The same, of what the loops around the step run over.

    record   not packed
    """
    around = (loop for of_frame in record["loops"] for loop in of_frame)
    names = ((loop["over"], f"the iterable of loop {at + 1} around the step") for at, loop in enumerate(around))
    return [sentence for node, name in names for sentence in _below(node, name)]


def _in_scope(scope: dict[str, Any], where: str, dead: Container[str] = ()) -> Iterator[str]:
    for name, node in with_fixed(scope).items():
        if name not in dead:
            yield from _below(node, f"{where}{name}")


def _below(node: Any, name: str) -> Iterator[str]:
    return (
        f"{where} cannot be recorded: it {found[1]}" for found, where in walk(node, name) if found[0] == Tag.REFUSED
    )
