"""Generators that are suspended between two items: their variables are part of the script's state.

The place of one is its instruction, and inside of its `for` loops the
positions of those, if they are followed. In other code, and in a generator expression, a loop hides its position. Such
a generator is refused once it has begun, unless a loop runs over it: a replay asks for the items before its own. So it
does of a library's generator inside such an expression: of that only what is the user's is recorded, as in a loop.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any

from ttprun.capture.position import iterables, library_loops, loops
from ttprun.capture.records.nodes import Node, RefusedNode, SameNode, SuspendedNode, TupleNode
from ttprun.capture.values.restore import Restore, kind_of, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.type_names import MISSING, name_of
from ttprun.introspect.frames import variables_of
from ttprun.introspect.whose import is_script_code

_FIRST = ".0"  # the variable in which a generator expression has its first iterable


def _where(value: types.GeneratorType[Any, Any, Any]) -> str:
    return f"{value.gi_code.co_filename}:{value.gi_code.co_qualname}:{value.gi_code.co_firstlineno}"


def _stands_at(value: types.GeneratorType[Any, Any, Any]) -> list[int]:
    """Its instruction, and the positions of its loops; nothing if it has ended."""
    frame = value.gi_frame
    return [] if frame is None else [frame.f_lasti, *(loop.position for loop in loops.of_frame(frame))]


def _hides_position(value: types.GeneratorType[Any, Any, Any]) -> bool:
    is_followed = is_script_code(value.gi_code.co_filename) and not _is_expression(value)
    return not is_followed and inspect.getgeneratorstate(value) != inspect.GEN_CREATED


def _is_expression(value: types.GeneratorType[Any, Any, Any]) -> bool:
    return value.gi_code.co_name == "<genexpr>"


def _why_hidden(value: types.GeneratorType[Any, Any, Any]) -> str:
    follows = "" if _is_expression(value) else library_loops.what_follows_of(value.gi_frame)
    return f"is the generator {value.__qualname__}, {follows or 'which does not show the positions of its loops'}"


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
        return RefusedNode(_why_hidden(value))
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
