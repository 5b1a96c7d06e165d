"""Names of types and functions in nodes (records/nodes.py), and what is raised when a node cannot be used.

Nothing here can make another process run code: types and functions are recorded by name, and a name is only looked up
among what the process has loaded by itself.
"""

from __future__ import annotations

import sys
from typing import Any

from ttprun.capture.records.nodes import AnyNode, FrozensetNode, Node, PlainNode, TupleNode
from ttprun.introspect.looks import (
    dictionary_of,
    dictionary_of_class,
    is_a,
    module_of_class,
    qualified_name_of_class,
)

MAX_DEPTH = 100  # msgpack itself gives up at 511 lists in each other


class CannotRestoreError(RuntimeError):
    """The replacement's variables do not match the record; the message names the variable."""


MISSING = type("Missing", (), {"__repr__": lambda self: "<not set>"})()
SETTLED = frozenset({float, int, bool, str, type(None)})  # values that are their own nodes


def is_settled(node: Node) -> bool:
    """Whether a node is of a value that can never change, so that the same object always has the same node."""
    if not isinstance(node, AnyNode):
        return True
    if isinstance(node, TupleNode | FrozensetNode):
        return node.kind is None and all(map(is_settled, node.items))
    return isinstance(node, PlainNode) and node.kind != "class"  # one of the user's may be given attributes


def name_of(kind: Any) -> str:
    """A type's or function's name for `look_up`: "module:qualified name"."""
    if issubclass(type(kind), type):
        return f"{module_of_class(kind)}:{qualified_name_of_class(kind)}"
    return f"{kind.__module__}:{kind.__qualname__}"


def short_name(name: str) -> str:
    """The part of a name for messages."""
    return name.rpartition(":")[2]


def look_up(name: str) -> Any:
    """The object of a name from `name_of` in this process, MISSING if it is not loaded."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module, MISSING)
    for part in path.split("."):
        if is_a(value, type):
            value = dictionary_of_class(value).get(part, MISSING)
        else:
            value = (dictionary_of(value) or {}).get(part, MISSING)
        if value is MISSING:
            return MISSING
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
    return value


def _look_up_in_classes(name: str) -> Any:
    """A type that a class made in its body and that does not know it: `Item = NamedTuple("Item", ...)`."""
    module, _, own = name.partition(":")
    values = list(vars(sys.modules[module]).values()) if module in sys.modules else []
    matches = (
        dictionary_of_class(value).get(own)
        for value in values
        if is_a(value, type) and module_of_class(value) == module
    )
    return next((value for value in matches if is_a(value, type) and name_of(value) == name), MISSING)


def look_up_type(name: str, base: type) -> type | None:
    """A type that this process has loaded, if it is a subclass of `base`."""
    value = look_up(name)
    if value is MISSING:
        value = _look_up_in_classes(name)
    return value if isinstance(value, type) and issubclass(value, base) else None
