"""Objects, by their attributes, in a dictionary or in slots; functions, methods and classes, by their names.

An object cannot be made in the replacement without running its class's own code, so the replay must have made it; its
attributes are written into it. A frozen dataclass is a value, and is made anew where it differs.

A function or class is recorded with the state that the user's own ones can have, too. A function that is found under
its name in its module is only named. One that is not (made inside another function), or that carries state in closure,
attributes or default values, must be the replacement's own at the same place; its state is written. A class of the
user's may hold counters and tables; those are attributes like others.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

from ttprun import frameworks
from ttprun.capture.records.nodes import (
    AnyNode,
    ClassNode,
    FunctionNode,
    MethodNode,
    ObjectNode,
    PartialNode,
    PlainNode,
    SameNode,
    ValueObjectNode,
)
from ttprun.capture.records.packing import MISSING, SETTLED, look_up, look_up_type, name_of
from ttprun.capture.values.changes import Remembered, Slots
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
    is_a,
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


_NO_STATE = frozenset({"__wrapped__", "__isabstractmethod__"})
_DESCRIPTORS = (
    types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType, types.GetSetDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, functools.cached_property, functools.partialmethod,
)  # fmt: skip
_named: Remembered[tuple[Any, PlainNode]] = Remembered()


@traces
def record_named(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A function or class that carries no state: found under its name, or compared by it."""
    node = _named.get(id(value))
    if node is not None and node[0] is value:
        return node[1]
    try:
        name = name_of(value)
        made = PlainNode("global", [name]) if look_up(name) is value else SameNode(name_of(type(value)), name)
    except (AttributeError, TypeError):
        return SameNode(name_of(type(value)), str(getattr(value, "__name__", "")))
    if isinstance(made, PlainNode):
        _named.keep(id(value), (value, made))
    return made


@traces
def record_cache(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A function with functools.lru_cache: what one of the user's remembers cannot be put into another process's."""
    if _is_own_cache(value):
        snapshot.trace.open += 1
    if _is_own_cache(value) and value.cache_info().currsize:
        return snapshot.unproved(type(value), "what it remembers is not recorded: a replacement computes it anew")
    return record_named(snapshot, value, depth)


@traces
def record_function(snapshot: Snapshot, value: types.FunctionType, depth: int) -> Any:
    """A Python function."""
    if not is_script_code(value.__code__.co_filename):
        return _place_of(value)
    defaults = _defaults(value)
    if not value.__closure__ and not value.__dict__ and all(type(item) in SETTLED for item in defaults):
        node = record_named(snapshot, value, depth)
        if isinstance(node, PlainNode):
            snapshot.trace.objects.append((value, value.__dict__))
            return node
    snapshot.trace.open += 1
    number = snapshot.number(value)
    cells = {}
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            cells[name] = snapshot.node(cell.cell_contents, depth + 1)
        except ValueError:  # an empty cell: a name that is not bound yet
            continue
    attributes = snapshot.attributes(value.__dict__, depth, _NO_STATE) if value.__dict__ else {}
    return FunctionNode(number, _where(value), cells, attributes, snapshot.items(defaults, depth))


def _defaults(value: types.FunctionType) -> list[Any]:
    return [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]


def _where(value: types.FunctionType) -> str:
    code = value.__code__
    return f"{value.__module__}:{code.co_qualname}:{code.co_firstlineno}"


def _place_of(value: types.FunctionType) -> PlainNode | SameNode:
    """A function of a library: by name, or by where it stands."""
    name = name_of(value)
    if look_up(name) is value:
        return PlainNode("global", [name])
    return SameNode("builtins:function", _where(value))


def restore_function(restore: Restore, live: Any, node: FunctionNode, name: str) -> Any:
    """The replacement's function, with the lost rank's state."""
    where, cells = node.where, node.cells
    if not isinstance(live, types.FunctionType) or _where(live) != where:
        return restore.refuse(live, unlike(name, "builtins:function", live, f"the function {where}"))
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    for key, cell in zip(live.__code__.co_freevars, live.__closure__ or (), strict=True):
        if key in cells:
            try:
                old = cell.cell_contents
            except ValueError:
                old = MISSING
            value = restore.value(old, cells[key], f"{name}.{key}")
            if value is not old and value is not MISSING:
                cell.cell_contents = value
    for key, item in node.attributes.items():
        live.__dict__[key] = restore.value(live.__dict__.get(key, MISSING), item, f"{name}.{key}")
    have = _defaults(live)
    for index, (old, item) in enumerate(zip(have, node.defaults, strict=True)):
        value = restore.value(old, item, f"{name}'s default {index}")
        if value is not old and value != old:
            restore.refuse(live, f"{name} has another default value than in the lost rank")
    return live


@traces
def record_method(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A bound method: its object, and the name."""
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType | type):
        return record_named(snapshot, value, depth)
    return MethodNode(snapshot.node(owner, depth + 1), value.__name__)


def restore_method(restore: Restore, live: Any, node: MethodNode, name: str) -> Any:
    """The method of the counterpart of its object."""
    old = getattr(live, "__self__", MISSING)
    owner = restore.value(old, node.owner, f"{name}.__self__")
    if owner is old and getattr(live, "__name__", "") == node.name:
        return live
    method = getattr(owner, node.name, MISSING) if owner is not MISSING else MISSING
    if isinstance(method, types.MethodType | types.BuiltinMethodType):
        return method
    return restore.refuse(live, unlike(name, "builtins:method", live, f"the method {node.name}"))


@traces
def record_partial(snapshot: Snapshot, value: functools.partial[Any], depth: int) -> Any:
    """functools.partial: function, arguments, keywords."""
    number = snapshot.number(value)
    parts = (value.func, value.args, value.keywords)
    return PartialNode(number, *(snapshot.node(part, depth + 1) for part in parts))


def restore_partial(restore: Restore, live: Any, node: PartialNode, name: str) -> Any:
    """The replacement's functools.partial if nothing has changed, else a new one."""
    is_here = type(live) is functools.partial
    old = (live.func, live.args, live.keywords) if is_here else (MISSING, MISSING, MISSING)
    new = [
        restore.value(part, item, f"{name}'s part")
        for part, item in zip(old, (node.function, node.arguments, node.keywords), strict=True)
    ]
    if all(map(is_, new, old)) and restore.claim(node.number, live):
        return live
    if any(part is MISSING for part in new):
        return restore.refuse(live, unlike(name, "functools:partial", live))
    made = functools.partial(new[0], *new[1], **new[2])
    restore.claim(node.number, made)
    return made


def class_attributes(kind: type) -> dict[str, Any]:
    """What a class holds beside its methods."""
    if any(
        name in dictionary_of_class(base) for base in bases_of(kind) for name in ("_member_map_", "_field_defaults")
    ):  # enumerations and named tuples do not change
        return {}
    return {
        name: _unbound(item)
        for name, item in dictionary_of_class(kind).items()
        if not (name[:2] == "__" and name[-2:] == "__") and name[:5] != "_abc_" and not _is_descriptor(item)
    }


def _is_descriptor(item: Any) -> bool:
    if type(item) in SETTLED or _is_own_cache(_unbound(item)):
        return False
    return is_a(item, _DESCRIPTORS) or hasattr(type(item), "__get__")


def _is_own_cache(item: Any) -> bool:
    """Whether it is a method of the user's with a cache."""
    code = getattr(item.__wrapped__, "__code__", None) if type(item) is functools._lru_cache_wrapper else None
    return code is not None and is_script_code(code.co_filename)


def _unbound(item: Any) -> Any:
    return item.__func__ if type(item) in (staticmethod, classmethod) else item


_classes: Remembered[tuple[list[Any], dict[str, Any]]] = Remembered()  # (all that a class holds, its attributes)


@traces
def record_class(snapshot: Snapshot, value: type, depth: int) -> Any:
    """A class of the user's, whose attributes may be counters and tables; other classes are recorded by name."""
    if not is_of_user(value):
        return record_named(snapshot, value, depth)
    scope: dict[str, Any] = gc.get_referents(dictionary_of_class(value))[0]
    snapshot.trace.contents.append(scope)
    content = [*scope, *scope.values()]
    entry = _classes.get(value)
    if entry is None or len(entry[0]) != len(content) or not all(map(is_, content, entry[0])):
        entry = (content, class_attributes(value))
        _classes.keep(value, entry)
    attributes = entry[1]
    if not attributes:
        return _without_attributes(snapshot, value, depth)
    names = snapshot.names_of(attributes)
    return ClassNode(snapshot.number(value), name_of(value), snapshot.lasting_attributes(names, attributes, depth))


def _without_attributes(snapshot: Snapshot, value: type, depth: int) -> Any:
    """Such a class is only named, and not for ever: it may be given some later."""
    node = record_named(snapshot, value, depth)
    return PlainNode("class", node.parts) if isinstance(node, PlainNode) else node


def restore_class(restore: Restore, live: Any, node: ClassNode, name: str) -> Any:
    """The attributes of the replacement's own class of that name."""
    if not is_a(live, type) or name_of(live) != node.name:
        live = look_up(node.name)
    if not is_a(live, type):
        return restore.refuse(live, f"{name} is the class {node.name} in the lost rank, which is not here")
    if restore.claim_or_refuse(node.number, live, name):
        for key, item in node.attributes.items():
            old = dictionary_of_class(live).get(key, MISSING)
            value = restore.value(old, item, f"{name}.{key}")
            if value is not old and value is not MISSING:
                type.__setattr__(live, key, value)
        for key in class_attributes(live).keys() - node.attributes.keys():
            type.__delattr__(live, key)
    return live
