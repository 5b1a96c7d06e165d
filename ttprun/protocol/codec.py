"""Messages as lines of JSON, and back. A line that is not one of our messages is refused with a reason.

A message is sent as {"op": name of its class, field: value, ...}. Nothing is unpickled, and a field of another type
than its annotation is refused, as is a value that its enum or `Literal` does not have. bytes are in base64. The text is
read and written by the standard library: msgspec refuses the lone surrogates that stand for the bytes of a path.
"""

from __future__ import annotations

import enum
import json
import threading
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict

_SHOWN = 80  # characters of what was refused
_MOST_SHOWN = 200  # of why


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """What all messages are, and their parts."""


class OfGeneration(Message, frozen=True):
    """What counts in one generation only."""

    generation: int


class AtBoundary(OfGeneration, frozen=True):
    """What concerns one boundary."""

    boundary: int


class Refused(Struct, frozen=True):
    """An invalid line.

    reason   what is wrong with it, in one line
    """

    reason: str


def _plain(value: Any) -> Any:
    """What JSON knows in place of a value that it does not know."""
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value.value if isinstance(value, enum.Enum) else asdict(value)


# msgspec looks at a class when it first reads one, and crashes if another thread comes meanwhile (seen with 0.22): the
# first of each is read by one thread alone.
_first = threading.Lock()
_met: set[type] = set()
_ENCODER = json.JSONEncoder(default=_plain)


def fields_of(message: Message) -> dict[str, Any]:
    """A message as `decode_fields` takes it."""
    return {"op": type(message).__name__, **asdict(message)}


def encode(message: Message) -> bytes:
    """One line of JSON, with its line feed."""
    return _ENCODER.encode(fields_of(message)).encode() + b"\n"


def decode(line: bytes, message_types: Mapping[str, type]) -> Any:
    """The message of a line, or `Refused`.

    message_types   classes by name
    """
    try:
        values = json.loads(line)
    except ValueError as error:  # also if it is not UTF-8
        return Refused(f"not JSON ({error}): {line[:_SHOWN]!r}")
    except RecursionError:
        return Refused(f"nested too deeply: {line[:_SHOWN]!r}")
    if not isinstance(values, dict) or not isinstance(values.get("op"), str):
        return Refused(f'not an object with a str "op": {line[:_SHOWN]!r}')
    return decode_fields(values, message_types)


def decode_fields(values: dict[str, Any], message_types: Mapping[str, type]) -> Any:
    """As `decode`, from the line's JSON object, which is modified."""
    name = values.pop("op", None)
    if not isinstance(name, str) or name not in message_types:
        return Refused(f"unknown message {str(name)[:_SHOWN]!r}: install the same version of ttprun on both sides")
    kind = message_types[name]
    try:
        if kind in _met:
            return convert(values, kind, str_keys=True)
        with _first:
            try:
                return convert(values, kind, str_keys=True)
            finally:
                _met.add(kind)
    except (ValidationError, UnicodeError) as error:
        return Refused(f"{name}: {str(error)[:_MOST_SHOWN]}".encode("unicode_escape").decode())
