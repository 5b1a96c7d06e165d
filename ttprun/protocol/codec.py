"""Messages as lines of JSON, and back. A line that is not one of our messages is refused with a reason.

A message is a frozen dataclass, sent as {"op": name of its class, field: value, ...}. Nothing is unpickled, and a field
of another type than its annotation is refused, as is a value that its enum or `Literal` does not have. bytes are in
base64. Standard library only: ranks read messages before they import torch.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_SHOWN = 80  # characters of what was refused


@dataclasses.dataclass(frozen=True)
class Refused:
    """An invalid line.

    reason   what is wrong with it, in one line
    """

    reason: str


class _UnfitError(ValueError):
    """A value does not fit its field."""


_Reader = Callable[[Any], Any]


def _plain(value: Any) -> Any:
    """What JSON knows in place of a value that it does not know."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.value if isinstance(value, enum.Enum) else vars(value)


_ENCODER = json.JSONEncoder(default=_plain)


def encode(message: Any) -> bytes:
    """One line of JSON, with its line feed."""
    return _ENCODER.encode({"op": type(message).__name__, **vars(message)}).encode() + b"\n"


def decode(line: bytes, known: Mapping[str, type]) -> Any:
    """The message of a line, or `Refused`.

    known   classes by name
    """
    try:
        values = json.loads(line)
    except ValueError as error:  # also if it is not UTF-8
        return Refused(f"not JSON ({error}): {line[:_SHOWN]!r}")
    except RecursionError:
        return Refused(f"nested too deeply: {line[:_SHOWN]!r}")
    if not isinstance(values, dict) or not isinstance(values.get("op"), str):
        return Refused(f'not an object with a str "op": {line[:_SHOWN]!r}')
    return decode_fields(values, known)


def decode_fields(values: dict[str, Any], known: Mapping[str, type]) -> Any:
    """As `decode`, from the line's JSON object, which is modified."""
    name = values.pop("op", None)
    if not isinstance(name, str) or name not in known:
        return Refused(f"unknown message {str(name)[:_SHOWN]!r}: install the same version of ttprun on both sides")
    try:
        return _reader_of_class(known[name])(values)
    except _UnfitError as error:
        return Refused(f"{name}: {error}")


@functools.cache
def _reader_of_class(cls: type) -> _Reader:
    """A function that makes an instance of a dataclass from its fields."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    needed = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(values: Any) -> Any:
        if not isinstance(values, dict):
            raise _unfit(f"an object ({cls.__name__})", values)
        if not needed <= values.keys():
            raise _UnfitError(f"it lacks {', '.join(sorted(needed - values.keys()))}")
        for name, value in values.items():
            reader = readers.get(name)
            if reader is None:
                raise _UnfitError(f"it has no field {name[:_SHOWN]!r}")
            try:
                values[name] = reader(value)
            except _UnfitError as error:
                raise _UnfitError(f"{name}: {error}") from None
        return cls(**values)

    return read


@functools.cache
def _reader(hint: Any) -> _Reader:
    """A function that checks a JSON value against an annotation, and converts it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return _read_float
    if hint in (int, str, bool):
        return functools.partial(_read_scalar, hint)
    if hint is bytes:
        return _read_bytes
    if origin is typing.Literal:
        return functools.partial(_read_choice, arguments)
    if isinstance(hint, enum.EnumType):
        return functools.partial(_read_choice, tuple(hint))
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return functools.partial(_read_optional, _reader(inner))
    if origin is list:
        return functools.partial(_read_list, _reader(arguments[0]))
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return functools.partial(_read_row, _reader(arguments[0]))
    if origin is tuple:
        return functools.partial(_read_tuple, [_reader(argument) for argument in arguments])
    if origin is dict:
        read_key = _read_int_key if arguments[0] is int else _reader(arguments[0])
        return functools.partial(_read_dict, read_key, _reader(arguments[1]))
    return _reader_of_class(hint)


def _read_scalar(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise _unfit(kind.__name__, value)
    return value


def _read_float(value: Any) -> float:
    if type(value) not in (float, int):
        raise _unfit("float", value)
    try:
        return float(value)
    except OverflowError:
        raise _unfit("float", "an integer that is too large") from None


def _read_bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(_read_scalar(str, value), validate=True)
    except ValueError:  # also if it is no ASCII
        raise _unfit("bytes in base64", value) from None


def _read_choice(choices: tuple[Any, ...], value: Any) -> Any:
    plain = [choice.value if isinstance(choice, enum.Enum) else choice for choice in choices]
    for choice, known in zip(choices, plain, strict=True):
        if type(value) is type(known) and value == known:
            return choice
    raise _unfit(f"one of {', '.join(map(repr, plain))}", value)


def _read_optional(read: _Reader, value: Any) -> Any:
    return None if value is None else read(value)


def _read_list(read: _Reader, value: Any) -> list[Any]:
    if type(value) is not list:
        raise _unfit("list", value)
    return [read(one) for one in value]


def _read_row(read: _Reader, value: Any) -> tuple[Any, ...]:
    return tuple(_read_list(read, value))


def _read_tuple(readers: list[_Reader], value: Any) -> tuple[Any, ...]:
    if type(value) is not list or len(value) != len(readers):
        raise _unfit(f"list of {len(readers)}", value)
    return tuple(read(one) for read, one in zip(readers, value, strict=True))


def _read_dict(read_key: _Reader, read: _Reader, value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _unfit("object", value)
    return {read_key(key): read(one) for key, one in value.items()}


def _read_int_key(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise _unfit("int as a key", key) from None


def _unfit(wanted: str, value: Any) -> _UnfitError:
    return _UnfitError(f"it should be {wanted}, and is {repr(value)[:_SHOWN]}")
