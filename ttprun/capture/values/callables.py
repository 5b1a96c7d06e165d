"""Functions, methods and classes: recorded by name, and with the state that the user's own ones can have.

A function that is found under its name in its module is only named. One that is not (made inside another function), or
that carries state in closure, attributes or default values, must be the replacement's own at the same place; its state
is written. A class of the user's may hold counters and tables; those are attributes like others.
"""

from __future__ import annotations

import functools
import gc
import types
from operator import is_
from typing import Any

from ttprun.capture.records.nodes import ClassNode, FunctionNode, MethodNode, PartialNode, PlainNode, SameNode
from ttprun.capture.records.packing import MISSING, SETTLED, look_up, name_of
from ttprun.capture.values.changes import Remembered
from ttprun.capture.values.gaps import record_not_proved
from ttprun.capture.values.objects import is_of_user
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot, traces
from ttprun.introspect.ownership import is_script_code
from ttprun.introspect.safe_reads import bases_of, dictionary_of_class, is_a

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
        return record_not_proved(snapshot, value, "what it remembers is not recorded: a replacement computes it anew")
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
