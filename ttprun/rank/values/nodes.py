"""The form of a record: nodes, their tags, how they become bytes, and what is raised when one cannot be used.

A scalar is its own node; every other node is a list [tag, ...]. Objects that can be shared or changed have a number;
where one is met again, there is a REFERENCE. Nothing here can make another process run code: types and functions are
recorded by name, and a name is only looked up among what the process has loaded by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgpack

from ttprun.rank.position.judgement import Tag as Tag
from ttprun.rank.process.looks import (
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
SETTLED = frozenset({float, int, bool, str, bytes, type(None)})


def is_settled(node: Any) -> bool:
    """Whether a node is of a value that can never change, so that the same object always has the same node."""
    if node.__class__ is not list:
        return True
    if node[0] is Tag.TUPLE or node[0] is Tag.FROZENSET:
        return len(node) == 2 and all(map(is_settled, node[1]))
    return node[0] is Tag.PLAIN and node[1] != "class"  # one of the user's may be given attributes


_packer = msgpack.Packer()  # kept for its buffer, which would be allocated anew each time


def pack(record: Any) -> bytes:
    """A record as bytes, also with integers beyond 64 bits and str with lone surrogates; main thread only."""
    try:
        packed: bytes = _packer.pack(record)
    except UnicodeEncodeError:
        try:
            packed = msgpack.packb(record, unicode_errors="surrogatepass")
        except OverflowError:
            packed = msgpack.packb(_without_big(record), unicode_errors="surrogatepass")
    except OverflowError:
        packed = msgpack.packb(_without_big(record), unicode_errors="surrogatepass")
    return packed


def unpack(packed: bytes | bytearray | memoryview) -> Any:
    """What `pack` has packed; tuples come back as lists."""
    return msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")


def unpack_items(packed: bytes) -> Iterator[Any]:
    """Nodes that were packed one after the other."""
    unpacker = msgpack.Unpacker(
        strict_map_key=False, unicode_errors="surrogatepass", max_buffer_size=max(1, len(packed))
    )
    unpacker.feed(packed)
    yield from unpacker


def _without_big(node: Any) -> Any:
    if node.__class__ is int:
        return node if -(1 << 63) <= node < 1 << 64 else [Tag.PLAIN, "int", hex(node)]
    if isinstance(node, list | tuple):
        return [_without_big(item) for item in node]
    if isinstance(node, dict):
        return {key: _without_big(item) for key, item in node.items()}
    return node


def name_of(kind: Any) -> str:
    """A type's or function's name for `look_up`: "module:qualified name"."""
    if is_a(kind, type):
        return f"{module_of_class(kind)}:{qualified_name_of_class(kind)}"
    return f"{kind.__module__}:{kind.__qualname__}"


def short_name(name: str) -> str:
    """The part of a name for messages."""
    return name.rpartition(":")[2]


def look_up(name: str) -> Any:
    """The object of a name from `name_of` in this process, MISSING if it is not loaded."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module, MISSING)
    for part in path.split("."):
        if is_a(found, type):
            found = dictionary_of_class(found).get(part, MISSING)
        else:
            found = (dictionary_of(found) or {}).get(part, MISSING)
        if found is MISSING:
            return MISSING
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
    return found


def _look_up_in_classes(name: str) -> Any:
    """A type that a class made in its body and that does not know it: `Item = NamedTuple("Item", ...)`."""
    module, _, own = name.partition(":")
    held = list(vars(sys.modules[module]).values()) if module in sys.modules else []
    found = (dictionary_of_class(one).get(own) for one in held if is_a(one, type) and module_of_class(one) == module)
    return next((one for one in found if is_a(one, type) and name_of(one) == name), MISSING)


def look_up_type(name: str, base: type) -> type | None:
    """A type that this process has loaded, if it is a subclass of `base`."""
    found = look_up(name)
    if found is MISSING:
        found = _look_up_in_classes(name)
    return found if isinstance(found, type) and issubclass(found, base) else None
