"""Python's own iterators in variables: their position is in the result of `__reduce__`.

In a node, the type called with the arguments, and set to the state, gives the iterator; one
that is at its end has no arguments. One over a list or the like is set in place, since a zip or a running loop may hold
it; another is made anew if it stands elsewhere. Iterators over sets and dictionaries cannot be set, and are compared.
"""

from __future__ import annotations

import collections
import itertools
import operator
from typing import Any

from ttprun.capture.records.nodes import IteratorNode, NotProvedNode, RefusedNode, SameNode
from ttprun.capture.values.process_local import record_unknown
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.type_names import MISSING, name_of
from ttprun.introspect import iterator_state

_EMPTIES: tuple[Any, ...] = ([], (), "", "ä", b"", bytearray(), range(0), range(1 << 70))
_EMPTY: dict[Any, Any] = dict(zip(map(type, map(iter, _EMPTIES)), _EMPTIES, strict=True))
_REVERSED: Any = type(reversed([]))
_BUILT = (
    enumerate, zip, map, filter, reversed, itertools.count, itertools.cycle, itertools.repeat, itertools.chain,
    itertools.islice, itertools.accumulate, itertools.compress, itertools.starmap, itertools.takewhile,
    itertools.dropwhile, itertools.filterfalse, itertools.zip_longest, itertools.product, itertools.permutations,
    itertools.combinations, itertools.combinations_with_replacement,
)  # fmt: skip
_TOLD: tuple[Any, ...] = (
    *_EMPTY,
    _REVERSED,
    *(kind for kind in _BUILT if "__reduce__" in vars(kind)),
)
# Python 3.14 takes __reduce__ away from itertools.
_KINDS = {name_of(kind): kind for kind in _TOLD}


def record_iterator(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """An iterator that Python or itertools has made."""
    kind = type(value)
    if kind not in _TOLD:
        return record_unknown_iterator(snapshot, value, depth)
    number = snapshot.number(value)
    reduced: Any = iterator_state.reduce(value)
    state: Any = reduced[2] if len(reduced) > 2 else None
    if len(reduced) == 2 and (kind in _EMPTY or kind is _REVERSED):
        return IteratorNode(number, name_of(kind), [], None)
    parts: list[Any] = list(reduced[1])
    if kind is itertools.cycle and state[1]:  # what comes before its list begins again
        parts = [list(parts[0])]
    nodes = [snapshot.node(part, depth + 1) for part in parts]
    return IteratorNode(number, name_of(kind), nodes, snapshot.node(state, depth + 1))


def record_unknown_iterator(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """One that does not show its position: refused, unless a followed loop uses it."""
    if id(value) in snapshot.followed:
        return SameNode(name_of(type(value)), "")
    return RefusedNode(f"is a {type(value).__qualname__}, which does not show its position")


def record_compiled_iterator(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """One of an extension module: compared by its pickled state, if it has one."""
    node = record_unknown(snapshot, value, depth)
    return record_unknown_iterator(snapshot, value, depth) if isinstance(node, NotProvedNode) else node


def record_compared_iterator(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """One over a set or a dictionary: how many items are left."""
    return SameNode(name_of(type(value)), str(operator.length_hint(value)))


def restore_iterator(restore: Restore, live: Any, node: IteratorNode, name: str) -> Any:
    """In place if possible; unchanged if it is at this position already; else a new one."""
    number, parts, state = node.number, node.arguments, node.state
    kind: Any = _KINDS[node.kind]
    if not parts and (kind in _EMPTY or kind is _REVERSED):
        return _at_its_end(restore, live, kind, number)
    old = iterator_state.reduce(live) if type(live) is kind else (None, (), None)
    old_state = old[2] if len(old) > 2 else None
    have = [*old[1], *[MISSING] * len(parts)]
    if kind is itertools.cycle and state.items[1]:
        have = [MISSING]
    new = [restore.value(have[i], part, f"{name}'s part {i}") for i, part in enumerate(parts)]
    new_state = restore.value(MISSING if old_state is None else old_state, state, name)
    if any(part is MISSING for part in new) or new_state is MISSING:
        return restore.refuse(live, unlike(name, node.kind, live))
    is_alike = len(old[1]) == len(new) and all(map(_is_alike, old[1], new))
    if type(live) is kind and is_alike and restore.claim(number, live):
        if new_state is not old_state and new_state != old_state:
            iterator_state.set_state(live, new_state)
        return live
    if kind in _EMPTY or kind is itertools.cycle:
        new[0] = iter(new[0])
    made = new[0] if kind in _EMPTY else reversed(new[0]) if kind is _REVERSED else kind(*new)
    if new_state is not None:
        iterator_state.set_state(made, new_state)
    restore.claim(number, made)
    return made


def _at_its_end(restore: Restore, live: Any, kind: Any, number: int) -> Any:
    if type(live) is kind and restore.claim(number, live):
        collections.deque(live, maxlen=0)
        return live
    made: Any = reversed([]) if kind is _REVERSED else iter(_EMPTY[kind])
    collections.deque(made, maxlen=0)
    restore.claim(number, made)
    return made


def _is_alike(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and type(new) in (int, str, bytes, bool, float, range) and old == new)


ITERATORS: tuple[Any, ...] = (*_EMPTY, _REVERSED, *_BUILT)
COMPARED_ITERATORS: tuple[Any, ...] = tuple(map(type, map(iter, (set(), {}, {}.values(), {}.items()))))
UNKNOWN_ITERATORS: tuple[Any, ...] = (
    itertools.groupby,
    itertools.pairwise,
    type(itertools.tee(())[0]),
    type(iter(int, 0)),
)
