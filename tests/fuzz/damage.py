"""Damage to recorded data: flipped bits, cuts, repeats, and other values in its JSON. Begin with `damaged`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[Any], Any]
# What no field expects, or what is at the edge of what one can hold.
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, -(2**63), 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf"), ""),
    *("\ud800", "a\nb", "x" * 5000, [], {}, [[]], {"a": 1}, [0] * 3),
)


@st.composite
def damaged(draw: Draw, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with some damage, now and then with none."""
    data = draw(st.sampled_from(seeds))
    kinds = (*[_flip, _other_value] * 5, _cut, _repeat, _splice, _nest)
    for _ in range(draw(st.integers(0, 3))):
        data = draw(st.sampled_from(kinds))(draw, data)
    return bytes(data)


def _place(draw: Draw, data: bytes) -> int:
    return int(draw(st.integers(0, max(0, len(data) - 1))))


def _flip(draw: Draw, data: bytes) -> bytes:
    """One bit is another one."""
    at, changed = _place(draw, data), bytearray(data)
    if changed:
        changed[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed)


def _cut(draw: Draw, data: bytes) -> bytes:
    """Some bytes are missing."""
    first, last = sorted((_place(draw, data), _place(draw, data)))
    return data[:first] + data[last:] if draw(st.booleans()) else data[:first]


def _repeat(draw: Draw, data: bytes) -> bytes:
    """A part comes twice."""
    first, last = sorted((_place(draw, data), _place(draw, data)))
    return data[:last] + data[first:]


def _splice(draw: Draw, data: bytes) -> bytes:
    """Some bytes are any others."""
    at = _place(draw, data)
    new = draw(st.binary(max_size=16))
    return data[:at] + new + data[at + len(new) :]


def _nest(draw: Draw, data: bytes) -> bytes:
    """As deep as no parser goes."""
    return draw(st.sampled_from((b"[", b'{"a":', b"[{"))) * 12_000 + data[:10]


def _other_value(draw: Draw, data: bytes) -> bytes:
    """One value of a JSON document is another one, or its key is missing, or there is one more."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _flip(draw, data)
    places = list(_places(document))
    if not places:
        return _flip(draw, data)
    parent, key = draw(st.sampled_from(places))
    how = draw(st.sampled_from(("replace", "replace", "remove", "add")))
    if how == "remove":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent[draw(st.sampled_from(("", "more", "op", "token")))] = draw(st.sampled_from(_ODD))
    else:
        parent[key] = draw(st.sampled_from(_ODD) | st.integers() | st.text(max_size=8))
    return json.dumps(document).encode()


def with_each_text_replaced(data: bytes, text: str) -> Iterator[bytes]:
    """A JSON document with one of its texts replaced, for each of them; nothing of other data."""
    try:
        document = json.loads(data)
    except ValueError:
        return
    for parent, key in list(_places(document)):
        if isinstance(known := parent[key], str):
            parent[key] = text
            yield json.dumps(document).encode()
            parent[key] = known


def _places(document: Any) -> Any:
    """(container, key or index) of each value in a document."""
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield document, key
        yield from _places(document[key])
