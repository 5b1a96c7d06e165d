"""The names of what is not proved, as `ttprun status` shows them. Begin with `names_of`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ttprun.capture.records.nodes import Node, NotProvedNode
from ttprun.capture.values import not_proved
from ttprun.capture.values.kept import TOO_DEAR
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.trees import walk

_MOST_NAMES = 20
_MOST_LETTERS = 100
_LEFT_ALONE = " ms a step to record; not recorded"
_known: tuple[list[str], list[str]] = ([], [])


def forget() -> None:
    """The run of the script is over."""
    global _known
    _known = ([], [])


def names_of(snapshot: Snapshot, scopes: Mapping[str, Mapping[str, Node]]) -> list[str]:
    """The parts of these variables that are not proved: "cache (sqlite3.Connection): it is in a file", in their order.

    snapshot   that has made the nodes
    scopes     by place ("train" for a function, "" for the script itself), nodes by variable
    """
    global _known
    if not snapshot.not_proved:
        return []
    if snapshot.not_proved != _known[0]:
        names = [
            shown
            for where, scope in scopes.items()
            for name, node in scope.items()
            for shown in _named(node, f"{where}: {name}" if where else name)
        ]
        names.sort(key=lambda name: not name.endswith(_LEFT_ALONE))
        _known = (snapshot.not_proved, list(dict.fromkeys(names))[:_MOST_NAMES])
    return _known[1]


def _named(node: Node, name: str) -> Iterable[str]:
    for inner, where in walk(node, name):
        if isinstance(inner, NotProvedNode):
            where = where if len(where) <= _MOST_LETTERS else f"{where[:40]}...{where[-40:]}"
            why = f"about {not_proved.taken_ms[inner.kind]:g}{_LEFT_ALONE}" if inner.why == TOO_DEAR else inner.why
            yield f"{where} ({inner.kind.removeprefix('builtins:').replace(':', '.')}): {why}"
