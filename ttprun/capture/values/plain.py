"""Immutable values: each kind is recorded by its parts, and made again from them.

CODECS holds both directions of every kind; a part of a PlainNode is a scalar, bytes, or such a node.
"""

from __future__ import annotations

import ast
import datetime
import decimal
import enum
import operator
import pathlib
import re
import sys
import types
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ttprun.capture.records.nodes import PlainNode, RefusedNode
from ttprun.capture.records.packing import MISSING, CannotRestoreError, look_up, look_up_type, name_of
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import Snapshot
from ttprun.introspect.safe_reads import dictionary_of, is_a, plain_of


def _int_text(value: int) -> str:
    return hex(value)  # unlike decimal text of any length


def _encode(value: Any) -> Any:
    """The node of a part; raises TypeError if it is not plain."""
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if type(value) is int:
        return value if abs(value) < 1 << 63 else PlainNode("int", [_int_text(value)])
    for base, kind in BASES:
        if issubclass(type(value), base):
            return PlainNode(kind, list(map(_encode, CODECS[kind][0](value))))
    raise TypeError(type(value).__qualname__)


def decode(node: Any) -> Any:
    """The value of a plain node, or of a part of one, which is read as a list."""
    if isinstance(node, PlainNode):
        kind, parts = node.kind, node.parts
    elif isinstance(node, list):
        _, kind, parts = node
    else:
        return node
    return CODECS[kind][1](*map(decode, parts))


def _enum_parts(value: enum.Enum) -> tuple[Any, ...]:
    members = type(value).__members__
    name = value.name if members.get(value.name) is value else None  # a combination of flags has no name of its own
    return name_of(type(value)), name, None if name is not None else value.value


def _enum_of(kind: str, name: str | None, value: Any) -> enum.Enum:
    enum_type = look_up_type(kind, enum.Enum)
    if enum_type is None:
        raise CannotRestoreError(f"{kind} is not in the replacement")
    member: enum.Enum = getattr(enum_type, name) if name is not None else enum_type(value)
    return member


def _path_of(kind: str, text: str) -> Any:
    path_type = look_up_type(kind, pathlib.PurePath)
    if path_type is None:
        raise CannotRestoreError(f"{kind} is not in the replacement")
    return path_type(text)


def dtype_text(dtype: Any) -> str:
    """A numpy dtype as text from which `dtype_of` makes it again, fields and all."""
    is_simple = dtype.names is None and dtype.subdtype is None
    return str(dtype.str) if is_simple else repr(numpy.lib.format.dtype_to_descr(dtype))


def dtype_of(text: str) -> numpy.dtype[Any]:
    """The dtype of a `dtype_text`."""
    dtype: numpy.dtype[Any] = (
        numpy.lib.format.descr_to_dtype(ast.literal_eval(text)) if text[0] in "[(" else numpy.dtype(text)
    )
    return dtype


def _found(name: str) -> Any:
    value = look_up(name)
    if value is MISSING:
        raise CannotRestoreError(f"{name} is not in the replacement")
    return value


def _module_of(name: str) -> types.ModuleType:
    if name not in sys.modules:
        raise CannotRestoreError(f"module {name} is not in the replacement")
    return sys.modules[name]


def _scalar_parts(value: Any) -> tuple[Any, ...]:
    if dictionary_of(value):
        raise TypeError("number or text with attributes")
    return name_of(type(value)), plain_of(value)


def _scalar_of(kind: str, value: Any) -> Any:
    scalar_type = look_up_type(kind, type(value))
    if scalar_type is None:
        raise CannotRestoreError(f"{kind} is not in the replacement")
    return type(value).__new__(scalar_type, value)


# Made by calling the type with what the value gives to pickle. A datetime is a date, too.
_OF_PARTS: tuple[Any, ...] = (
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, range, slice, torch.device,
    operator.itemgetter, operator.attrgetter,
)  # fmt: skip
_MADE: dict[str, Any] = {kind.__name__: kind for kind in _OF_PARTS}
Codec = tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]

# kind: (parts of a value, value of the parts)
CODECS: dict[str, Codec] = {
    "bytes": (lambda v: (v,), bytes),
    "int": (lambda v: (_int_text(v),), lambda text: int(text, 16)),
    "complex": (lambda v: (v.real, v.imag), complex),
    "made": (lambda v: (type(v).__name__, *v.__reduce_ex__(4)[1]), lambda kind, *parts: _MADE[kind](*parts)),
    "timezone": (
        lambda v: (*v.__getinitargs__(), None)[:2],
        lambda offset, name: datetime.timezone(offset) if name is None else datetime.timezone(offset, name),
    ),
    "zone": (lambda v: (v.key,), zoneinfo.ZoneInfo),
    "path": (lambda v: (name_of(type(v)), pathlib.PurePath.__str__(v)), _path_of),
    "enum": (_enum_parts, _enum_of),
    "pattern": (lambda v: (v.pattern, v.flags), re.compile),
    "ellipsis": (lambda v: (), lambda: ...),
    "torch constant": (lambda v: (str(v),), lambda text: getattr(torch, text.removeprefix("torch."))),
    "shape": (lambda v: tuple(v), lambda *sizes: torch.Size(sizes)),
    "numpy dtype": (lambda v: (dtype_text(v),), dtype_of),
    "numpy scalar": (
        lambda v: (dtype_text(v.dtype), v.tobytes()),
        lambda text, raw: numpy.frombuffer(raw, dtype=dtype_of(text)).copy()[0],
    ),
    "scalar": (_scalar_parts, _scalar_of),
    "module": (lambda v: (v.__name__,), _module_of),
    "global": (lambda v: (name_of(v),), _found),
    "class": (lambda v: (name_of(v),), _found),
}  # fmt: skip

# The first base that fits decides; a datetime is a date, and an IntEnum's member an int, too.
BASES: tuple[tuple[type, str], ...] = (
    (enum.Enum, "enum"),
    *((kind, "made") for kind in _MADE.values()),
    (datetime.timezone, "timezone"),
    (zoneinfo.ZoneInfo, "zone"),
    (pathlib.PurePath, "path"),
    (re.Pattern, "pattern"),
    (type(...), "ellipsis"),
    (torch.dtype, "torch constant"),
    (torch.layout, "torch constant"),
    (torch.memory_format, "torch constant"),
    (torch.Size, "shape"),
    (complex, "complex"),
)
# What is made again is of exactly these types.
EXACT = frozenset(base for base, kind in BASES if kind not in ("enum", "path")) | {bytes}


def record_plain(kind: str) -> Any:
    """A handler for immutable values of one kind."""
    parts = CODECS[kind][0]

    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        try:
            return PlainNode(kind, list(map(_encode, parts(value))))
        except TypeError as error:
            return RefusedNode(f"is a {type(value).__qualname__} with a {error} in it")

    return handle


def _member_again(live: enum.Enum, node: PlainNode) -> Any:
    """The recorded member, of the class of `live` if it has that name: one that a function makes is not found."""
    if node.kind != "enum" or decode(node.parts[0]) != name_of(type(live)):
        return decode(node)
    member, value = map(decode, node.parts[1:])
    return type(live)(value) if member is None else type(live).__members__[member]


def restore_plain(restore: Restore, live: Any, node: PlainNode, name: str) -> Any:
    """The value again; `live` itself if it is the same, since others may hold it."""
    try:
        value = _member_again(live, node) if is_a(live, enum.Enum) else decode(node)
    except CannotRestoreError as error:
        return restore.refuse(live, f"{name} cannot be restored: {error}")
    if live is value:
        return live
    is_same = type(live) is type(value) and type(live) in EXACT and live == value and repr(live) == repr(value)
    return live if is_same else value
