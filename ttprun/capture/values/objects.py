"""Objects: their attributes, in a dictionary or in slots.

An object cannot be made in the replacement without running its class's own code, so the replay must have made it; its
attributes are written into it. A frozen dataclass is a value, and is made anew where it differs.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

from ttprun import frameworks
from ttprun.capture.records.nodes import AnyNode, ObjectNode, PlainNode, SameNode, ValueObjectNode
from ttprun.capture.records.packing import MISSING, look_up_type, name_of
from ttprun.capture.values.changes import Slots
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot, traces
from ttprun.introspect.ownership import is_script_code, is_state
from ttprun.introspect.safe_reads import (
    attributes_of,
    bases_of,
    dictionary_getter,
    dictionary_of,
    dictionary_of_class,
    has_method,
    of_types,
    slots_of,
)

# Attributes that mean something in their own process only.
_PROCESS_LOCAL = """
    pid _pid ppid _parent_pid _owner_pid tid fd _fd fileno _fileno ident _ident native_id _native_id
    thread_id _thread_id port _port address _address hostname
"""
PROCESS_LOCAL = frozenset(_PROCESS_LOCAL.split())


@of_types
def is_of_user(kind: type) -> bool:
    """Whether a class is defined in the user's code."""
    return is_state(kind)


# Methods of a class by which pickle makes its objects in another way, or by which they let go of what they own.
_SAY_MORE = {
    "__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__",
    "__del__",
}  # fmt: skip

# Of objects of these classes some attributes are left to the replay; see `leave_out`.
_LEFT_OUT: list[tuple[type, frozenset[str]]] = []


def leave_out(base: type, names: str) -> None:
    """Attributes of a class's objects that are neither recorded nor changed.

    base    the class, whose subclasses are meant too
    names   separated by spaces
    """
    _LEFT_OUT.append((base, frozenset(names.split())))


@of_types
def left_out(kind: type) -> frozenset[str]:
    """Names of the attributes that are left to the replay."""
    names = [attributes for base, attributes in _LEFT_OUT if issubclass(kind, base)]
    return frozenset().union(*names, left_out_by_framework(kind), () if is_of_user(kind) else PROCESS_LOCAL)


@of_types
def left_out_by_framework(kind: type) -> frozenset[str]:
    """Those of them that a framework's file names."""
    return frozenset().union(*(frameworks.LEFT_OUT.get(name_of(base), "").split() for base in bases_of(kind)))


class _Form(NamedTuple):
    """What is known of a class.

    getter    of the dictionary of one of its objects; None if attributes are anywhere else
    has_end   its objects notice when they die
    without   what is left out of them
    """

    name: str
    getter: Callable[[Any], dict[str, Any]] | None
    has_end: bool
    without: frozenset[str]


@of_types
def form_of_class(kind: type) -> _Form:
    """What is known of a class."""
    getter = None if slots_of(kind) else dictionary_getter(kind)
    return _Form(name_of(kind), getter, has_method(kind, "__del__"), left_out(kind))


@traces
def record_object(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """An object with attributes."""
    name, getter, has_end, without = form_of_class(type(value))
    if getter is None:
        trace, slots = snapshot.trace, slots_of(type(value))
        trace.open += has_end or not slots
        trace.contents.append(Slots(value, [slot for key, slot in slots.items() if key not in without]))
        trace.typed.append(value)
        if (own := dictionary_of(value)) is not None:
            trace.objects.append((value, own))
        return ObjectNode(snapshot.number(value), name, snapshot.attributes(attributes_of(value), depth, without))
    own = getter(value)
    if has_end:  # it is not kept alive
        snapshot.trace.open += 1
    snapshot.trace.objects.append((value, own))
    if snapshot.is_separate:
        return ObjectNode(snapshot.number(value), name, snapshot.attributes(own, depth, without))
    number = snapshot.number(value)
    return ObjectNode(number, name, snapshot.lasting_attributes(snapshot.names_of(own, without), own, depth))


@traces
def record_python_module(snapshot: Snapshot, value: types.ModuleType, depth: int) -> Any:
    """A module by its name. One that is not found by it is a part of an extension or a file that was run by hand."""
    scope = dictionary_of(value) or {}
    name = str(scope.get("__name__"))
    if sys.modules.get(name) is value:
        return PlainNode("module", [name])
    file = scope.get("__file__")
    if file and is_script_code(file):
        return record_object(snapshot, value, depth)
    snapshot.trace.open += 1
    return SameNode(name_of(type(value)), name)


def made_when_needed(name: str, attributes: dict[str, Any]) -> Any:
    """An object of a class that a framework makes when it needs one; MISSING if the class is not such a one.

    attributes   nodes of the lost rank's object
    """
    kind = look_up_type(name, object) if name in frameworks.MADE else None
    if kind is None:
        return MISSING
    make = frameworks.MADE[name]
    if make is None:
        return object.__new__(kind)
    return make(kind, {key: node for key, node in attributes.items() if not isinstance(node, AnyNode)})


def restore_object(restore: Restore, live: Any, node: ObjectNode, name: str) -> Any:
    """Write the attributes into the replacement's object."""
    kind, attributes = node.kind, node.attributes
    if name_of(type(live)) != kind and (made := made_when_needed(kind, attributes)) is not MISSING:
        live = made
    if (live is MISSING or live is None) and (own_type := look_up_type(kind, object)) and _is_made_by_pickle(own_type):
        return _made_again(restore, live, own_type, node, name)
    if name_of(type(live)) != kind or issubclass(type(live), type):
        return restore.refuse(live, unlike(name, kind, live))
    if restore.claim_or_refuse(node.number, live, name):
        restore_attributes(restore, live, attributes, name, keep=left_out(type(live)))
    return live


def _made_again(restore: Restore, live: Any, kind: type, node: ObjectNode, name: str) -> Any:
    """An object that the replay has not made, as pickle would make it; `live` if it would lack an attribute."""
    made: Any = object.__new__(kind)
    restore.claim(node.number, made)
    restore_attributes(restore, made, node.attributes, name)
    if attributes_of(made).keys() != node.attributes.keys():
        restore.disclaim(node.number)
        return restore.refuse(live, unlike(name, node.kind, live))
    if not is_of_user(kind):  # its constructor may have noted it somewhere in its package
        restore.note_made(made, name)
    return made


@of_types
def _is_made_by_pickle(kind: type) -> bool:
    """Whether the objects of a class are their attributes: it says nothing else to pickle, and owns nothing."""
    own = (dictionary_of_class(base).keys() & _SAY_MORE for base in bases_of(kind) if base is not object)
    is_whole = left_out(kind) <= (frozenset() if is_of_user(kind) else PROCESS_LOCAL)
    return is_whole and not any(own)


def restore_attributes(
    restore: Restore, live: Any, nodes: dict[str, Any], name: str, keep: frozenset[str] | None = frozenset()
) -> None:
    """Write an object's attributes, and take away those that the lost rank's has not.

    keep    names that are not recorded, and stay; None: all that are not recorded stay
    """
    scope = attributes_of(live)
    slots = slots_of(type(live))
    own = dictionary_of(live)
    for key, node in nodes.items():
        old = scope.get(key, MISSING)
        value = restore.value(old, node, f"{name}.{key}")
        if value is not old and value is not MISSING:
            if key in slots:
                slots[key].__set__(live, value)
            elif own is not None:
                own[key] = value
    if keep is None:
        return
    for key in [key for key in scope if key not in nodes and key not in keep]:
        if key in slots:
            slots[key].__delete__(live)
        elif own is not None:
            del own[key]


def is_frozen(kind: type) -> bool:
    """Whether a class is a frozen dataclass."""
    parameters = (dictionary_of_class(base).get("__dataclass_params__") for base in bases_of(kind))
    return bool(getattr(next(filter(None, parameters), None), "frozen", False))


@traces
def record_value_object(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A frozen dataclass: it has no identity worth keeping."""
    trace, attributes, slots = snapshot.trace, dictionary_of(value), slots_of(type(value))
    if slots:
        trace.contents.append(Slots(value, slots.values()))
        trace.typed.append(value)
    if attributes is not None:
        trace.objects.append((value, attributes))
    trace.open += attributes is None and not slots
    return ValueObjectNode(name_of(type(value)), snapshot.attributes(attributes_of(value), depth))


def restore_value_object(restore: Restore, live: Any, node: ValueObjectNode, name: str) -> Any:
    """The replacement's object if it has the same fields, else a new one."""
    kind = type(live) if name_of(type(live)) == node.kind else look_up_type(node.kind, object)
    if kind is None or not is_frozen(kind):
        return restore.refuse(live, unlike(name, node.kind, live))
    old = attributes_of(live) if type(live) is kind else {}
    fields = {key: restore.value(old.get(key, MISSING), item, f"{name}.{key}") for key, item in node.attributes.items()}
    if len(old) == len(fields) and all(map(_is_as_it_was, fields.values(), map(old.get, fields))):
        return live
    if any(value is MISSING for value in fields.values()):
        return restore.refuse(live, f"{name} holds objects that are not in the replacement and cannot be recorded")
    made: Any = object.__new__(kind)
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made


def _is_as_it_was(new: Any, old: Any) -> bool:
    return is_(new, old) or (type(new) is type(old) and type(new) in (int, str, bool, bytes) and new == old)
