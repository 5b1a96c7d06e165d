"""How a record and its nodes become bytes, and how they are read: nothing that is read is unpickled."""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
import msgspec

from ttprun.capture.records.module_description import ModuleDescription
from ttprun.capture.records.nodes import Named, Node


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
