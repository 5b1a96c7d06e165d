"""How a record and its nodes become bytes, and how they are read: nothing that is read is unpickled.

Nothing here can make another process run code: types and functions are recorded by name, and a name is only looked up
among what the process has loaded by itself.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import msgpack
import msgspec

from ttprun.capture.records.nodes import AnyNode, FrozensetNode, Named, Node, PlainNode, TupleNode
from ttprun.introspect.safe_reads import (
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


class ModuleDescription(msgspec.Struct, frozen=True, gc=False):
    """What hardly ever changes of a module.

    modules     [path, type] of each part
    tensors     [path, shape] of each that no optimizer updates
    sharded     paths of those that are sharded
    frozen      of each parameter, whether it is learnt
    hooks       how many there are on each part, by kind, and on each parameter
    passing     paths of buffers that are not in a state_dict
    attributes  the settled ones, by the path of the part
    """

    modules: list[list[str]]
    tensors: list[tuple[str, list[int]]]
    sharded: list[str]
    frozen: list[bool]
    hooks: list[int]
    passing: list[str]
    attributes: dict[str, dict[str, Node]]


class MalformedRecordError(ValueError):
    """What was read is not what `pack` packs."""


_T = TypeVar("_T")
_RAW = (bytes, bytearray, memoryview)  # packed as they are; msgspec would make text of them
_node: msgspec.msgpack.Decoder[Node] = msgspec.msgpack.Decoder(Node)
_named = msgspec.msgpack.Decoder(dict[str, Node])
_description = msgspec.msgpack.Decoder(ModuleDescription)


def _plain(value: Any) -> Any:
    """A text or number of a subclass, which msgspec does not know."""
    for base, plain in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if issubclass(type(value), base):
            return plain(value)
    raise TypeError(f"a {type(value).__qualname__} cannot be packed")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def pack(record: Any) -> bytes:
    """A record or a part of one as bytes, also with integers beyond 64 bits and str with lone surrogates."""
    try:
        return _encoder.encode(record)
    except (UnicodeEncodeError, OverflowError):
        plain = _without_big(msgspec.to_builtins(record, builtin_types=_RAW, enc_hook=_plain))
        packed: bytes = msgpack.packb(plain, unicode_errors="surrogatepass")
        return packed


def unpack_as(decoder: msgspec.msgpack.Decoder[_T], packed: bytes | bytearray | memoryview) -> _T:
    """What `pack` has packed, checked against a decoder's type. Raises MalformedRecordError."""
    try:
        try:
            return decoder.decode(packed)
        except UnicodeDecodeError:
            unpacked = msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")
            return msgspec.convert(unpacked, decoder.type, builtin_types=(bytes,))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MalformedRecordError(f"a record is not what ttprun writes: {error}") from None


def unpack_node(packed: bytes) -> Node:
    """One node. Raises MalformedRecordError."""
    return unpack_as(_node, packed)


def unpack_named(packed: bytes) -> Named:
    """Nodes by name. Raises MalformedRecordError."""
    return unpack_as(_named, packed)


def unpack_description(packed: bytes) -> ModuleDescription:
    """A module's. Raises MalformedRecordError."""
    return unpack_as(_description, packed)


def listed(items: list[Node] | bytes) -> list[Node]:
    """A container's nodes, which may be packed one after the other. Raises MalformedRecordError."""
    if isinstance(items, list):
        return items
    unpacker = msgpack.Unpacker(
        strict_map_key=False, unicode_errors="surrogatepass", max_buffer_size=max(1, len(items))
    )
    unpacker.feed(items)
    try:
        return msgspec.convert(list(unpacker), list[Node], builtin_types=(bytes,))
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedRecordError(f"a record is not what ttprun writes: {error}") from None


def _without_big(node: Any) -> Any:
    if node.__class__ is int:
        return node if -(1 << 63) <= node < 1 << 64 else ["p", "int", [hex(node)]]  # a PlainNode
    if isinstance(node, list | tuple):
        return [_without_big(item) for item in node]
    if isinstance(node, dict):
        return {key: _without_big(item) for key, item in node.items()}
    return node
