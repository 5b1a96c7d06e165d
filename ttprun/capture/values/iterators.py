"""Iterators in variables: Python's own, and generators that are suspended between two items.

The position of Python's own is in the result of `__reduce__`. A generator's variables are part of the script's state.
Its place is its instruction, and inside of its `for` loops the positions of those, if they are followed. In other code,
and in a generator expression, a loop hides its position. Such a generator is refused once it has begun, unless a loop
runs over it: a replay asks for the items before its own. So it does of a library's generator inside such an expression:
of that only what is the user's is recorded, as in a loop.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Sequence
from typing import Any

from ttprun.capture.position import call_site, iterables, loops
from ttprun.capture.records.nodes import (
    ExpressionNode,
    IteratorNode,
    Node,
    NotProvedNode,
    RefusedNode,
    SameNode,
    SuspendedNode,
    TupleNode,
)
from ttprun.capture.records.packing import MISSING, name_of
from ttprun.capture.values.process_objects import record_unknown
from ttprun.capture.values.restore import Restore, kind_of, place_of, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.introspect import safe_reads
from ttprun.introspect.ownership import is_script_code, variables_of

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
    reduced: Any = safe_reads.state_of_iterator(value)
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
    return RefusedNode(f"is a {type(value).__qualname__}, which does not show its position", "iterator-position")


def record_compiled_iterator(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """One of an extension module: compared by its pickled state, if it has one."""
    node = record_unknown(snapshot, value, depth)
    return record_unknown_iterator(snapshot, value, depth) if isinstance(node, NotProvedNode) else node


def restore_iterator(restore: Restore, live: Any, node: IteratorNode, name: str) -> Any:
    """In place if possible; unchanged if it is at this position already; else a new one."""
    number, parts, state = node.number, node.arguments, node.state
    kind: Any = _KINDS[node.kind]
    if not parts and (kind in _EMPTY or kind is _REVERSED):
        return _at_its_end(restore, live, kind, number)
    old = safe_reads.state_of_iterator(live) if type(live) is kind else (None, (), None)
    old_state = old[2] if len(old) > 2 else None
    have = [*old[1], *[MISSING] * len(parts)]
    if kind is itertools.cycle and state.items[1]:
        have = [MISSING]
    new = [restore.value(have[i], part, f"{name}'s part {i}") for i, part in enumerate(parts)]
    new_state = restore.value(MISSING if old_state is None else old_state, state, name)
    if any(part is MISSING for part in new) or new_state is MISSING:
        return restore.refuse(live, unlike(name, node.kind, live))
    is_alike = len(old[1]) == len(new) and all(
        mine is theirs
        or (type(mine) is type(theirs) and type(theirs) in (int, str, bytes, bool, float, range) and mine == theirs)
        for mine, theirs in zip(old[1], new, strict=True)
    )
    if type(live) is kind and is_alike and restore.claim(number, live):
        if new_state is not old_state and new_state != old_state:
            safe_reads.set_state_of_iterator(live, new_state)
        return live
    if kind in _EMPTY or kind is itertools.cycle:
        new[0] = iter(new[0])
    made = new[0] if kind in _EMPTY else reversed(new[0]) if kind is _REVERSED else kind(*new)
    if new_state is not None:
        safe_reads.set_state_of_iterator(made, new_state)
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


ITERATORS: tuple[Any, ...] = (*_EMPTY, _REVERSED, *_BUILT)
UNKNOWN_ITERATORS: tuple[Any, ...] = (
    itertools.groupby,
    itertools.pairwise,
    type(itertools.tee(())[0]),
    type(iter(int, 0)),
)


_FIRST = ".0"  # the variable in which a generator expression has its first iterable


def _where(value: types.GeneratorType[Any, Any, Any]) -> str:
    return place_of(value.gi_code)


def _stands_at(value: types.GeneratorType[Any, Any, Any]) -> list[int]:
    """Its instruction, and the positions of its loops; nothing if it has ended."""
    frame = value.gi_frame
    return [] if frame is None else [frame.f_lasti, *(loop.position for loop in loops.of_frame(frame))]


def _hides_position(value: types.GeneratorType[Any, Any, Any]) -> bool:
    is_followed = is_script_code(value.gi_code.co_filename) and not _is_expression(value)
    return not is_followed and inspect.getgeneratorstate(value) != inspect.GEN_CREATED


def _is_expression(value: types.GeneratorType[Any, Any, Any]) -> bool:
    return value.gi_code.co_name == "<genexpr>"


@functools.lru_cache(maxsize=256)
def _has_one_loop(code: types.CodeType) -> bool:
    loops_in_it = sum(instruction.opname == "FOR_ITER" for instruction in dis.get_instructions(code))
    return loops_in_it == 1 and not code.co_freevars


def _hidden(value: types.GeneratorType[Any, Any, Any]) -> RefusedNode:
    follows = "" if _is_expression(value) else call_site.what_follows_of(value.gi_frame)
    return RefusedNode(
        f"is the generator {value.__qualname__}, {follows or 'which does not show the positions of its loops'}",
        "loop-of-a-library" if follows else "iterator-position",
    )


def record_generator(snapshot: Snapshot, value: types.GeneratorType[Any, Any, Any], depth: int) -> Any:
    """A generator, of the user's or of a library's."""
    frame = value.gi_frame
    if value.gi_running:
        return SameNode(name_of(type(value)), "running")  # its frame is on the stack
    number = snapshot.number(value)
    if frame is None:
        return SuspendedNode(number, _where(value), _stands_at(value), {}, None)
    active, variables, inner = loops.of_frame(frame), variables_of(frame), None
    snapshot.followed |= iterables.followed(active)
    if id(value) in snapshot.followed:
        if _is_expression(value):
            inner = iterables.inside_library(variables.get(_FIRST))
        snapshot.followed |= iterables.ids_of_generators((value.gi_yieldfrom, *(inner or ())))
    elif _hides_position(value):
        # An expression with one loop, and no outer variables, is determined by its first iterable alone.
        if not (_is_expression(value) and value.gi_yieldfrom is None and _has_one_loop(value.gi_code)):
            return _hidden(value)
        return ExpressionNode(number, _where(value), snapshot.node(variables[_FIRST], depth + 1))
    for loop in active:
        loop.note_suspended()
    snapshot.generator_loops += [loop.record() for loop in active]
    if inner is not None:
        variables = {name: variable for name, variable in variables.items() if name != _FIRST}
    within = snapshot.node(value.gi_yieldfrom or inner or None, depth + 1)
    nodes = snapshot.variables(variables)
    overs = list(map(snapshot.over, active))
    return SuspendedNode(number, _where(value), _stands_at(value), nodes, within, overs)


def restore_generator(restore: Restore, live: Any, node: SuspendedNode, name: str) -> Any:
    """Write its variables; it must stand at the same instruction."""
    where = node.where
    if not isinstance(live, types.GeneratorType) or _where(live) != where:
        return restore.refuse(live, unlike(name, "builtins:generator", live, f"the generator {where}"))
    frame = live.gi_frame
    if _stands_at(live) != node.place:
        return restore.refuse(live, f"{name} is a generator that stands elsewhere than in the lost rank")
    if restore.claim_or_refuse(node.number, live, name) and frame is not None:
        if _is_expression(live) and _FIRST not in node.variables:
            within = iterables.inside_library(variables_of(frame).get(_FIRST)) or ()
            _put_in_place(restore, within, node.inner.items if isinstance(node.inner, TupleNode) else [], f"{name}/")
            restore.frame(frame, node.variables, f"{name}/", dead={_FIRST})
            return live
        old = live.gi_yieldfrom
        if restore.value(MISSING if old is None else old, node.inner, f"{name}/") not in (old, None):
            return restore.refuse(live, f"{name} takes from another iterator than in the lost rank")
        restore.frame(frame, node.variables, f"{name}/")
        _restore_loops(restore, frame, node, name)
    return live


def restore_expression(restore: Restore, live: Any, node: ExpressionNode, name: str) -> Any:
    """In place if its iterator could be set; else a new one over an iterator that stands where the lost rank's did."""
    if not isinstance(live, types.GeneratorType) or not _is_expression(live) or live.gi_frame is None:
        return restore.refuse(live, unlike(name, "builtins:generator", live, f"the generator {node.where}"))
    code = live.gi_code if _where(live) == node.where else restore.code(node.where)
    if code is None:
        return restore.refuse(live, unlike(name, "builtins:generator", live, f"the generator {node.where}"))
    first = variables_of(live.gi_frame).get(_FIRST)
    iterator = restore.value(first, node.first, f"{name}'s iterator")
    made = live
    if iterator is not first or code is not live.gi_code:
        made = types.FunctionType(code, live.gi_frame.f_globals)(iterator)
    restore.claim(node.number, made)
    return made


def _restore_loops(restore: Restore, frame: types.FrameType, node: SuspendedNode, name: str) -> None:
    """Write what the active loops of a generator, which stands where the lost rank's does, iterate over."""
    for loop, over in zip(loops.of_frame(frame), node.overs, strict=False):
        restore_loop(restore, loop, over, f"{name}/")


def restore_loop(restore: Restore, loop: loops.Loop, node: Node, where: str = "") -> None:
    """Write what an active loop iterates over.

    loop    of the replacement, at the recorded place
    node    of what the lost rank's iterates over
    where   goes before the loop's place in a reason
    """
    live, name = iterables.over(loop), f"{where}{loop.site.key}: "
    if type(live) is tuple or isinstance(node, TupleNode):
        _put_in_place(restore, live or (), node.items if isinstance(node, TupleNode) else [], name)
    else:
        restore.value(live, node, f"{name}{kind_of(live)}")


def _put_in_place(restore: Restore, live: Sequence[Any], nodes: list[Any], name: str) -> None:
    """Set iterators that loops use to the lost rank's positions: they cannot be replaced by others."""
    if len(live) != len(nodes):
        restore.refuse(live, f"{name}a loop runs over other iterators than in the lost rank")
        return
    for items, node in zip(live, nodes, strict=True):
        if restore.value(items, node, f"{name}{kind_of(items)}") is not items:
            why = "a loop runs over it, and it stands elsewhere than in the lost rank"
            restore.refuse(items, f"{name}{kind_of(items)}: {why}")
