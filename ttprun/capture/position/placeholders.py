"""Placeholders for the items that the lost rank has used, in a replay.

A loop that a replay begins at item k requests the k items before that, and drops them. So `enumerate`, `zip`, `islice`,
a progress bar or a generator in between advances by itself. But nothing is loaded for these items: an iterator that
knows its own position (a DataLoader's, or a generator with a loop that begins in the middle) yields placeholders
instead.

Every computation with a placeholder gives a placeholder, until the replay reaches the boundary whose record restores
the script's variables. Code that needs the value of one fails, and so does any code that gets one later: that ends the
replay, with this reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

END = object()
_left = 0


class FirstJump:
    """A replay's way to its first recorded boundary.

    is_open   the replay has not reached it: its variables will be overwritten
    """

    is_open = False


class PlaceholderUsedError(RuntimeError):
    """Code of the script needs an item that a replay skips."""


def pass_over(iterable: Iterable[Any], count: int) -> Iterator[Any]:
    """An iterator of which the first `count` items are dropped."""
    global _left
    before, _left = _left, count
    try:
        items = iter(iterable)  # which may request an item already
        while _left and next(items, END) is not END:
            _left -= 1
    finally:
        _left = before
    return items


def wanted() -> int:
    """How many items the loop that requests one now will drop, including that one."""
    return _left


def hand_out(of: Any = None, at_least: int = 0) -> Iterator[Any]:
    """Placeholders for all items that are dropped.

    of         an item: the placeholders have the same structure of tuples, lists and dictionaries
    at_least   placeholders, if more items are requested here than the loop drops, as it gets several at a time
    """
    for _ in range(max(at_least, _left)):
        if not _left:
            return
        yield like(of)


def like(item: Any) -> Any:
    """A placeholder that can be unpacked like the item."""
    kind = type(item)
    if kind is dict:
        return {key: like(value) for key, value in item.items()}
    if kind is list:
        return [like(part) for part in item]
    if isinstance(item, tuple) and (kind is tuple or hasattr(kind, "_make")):
        parts = map(like, item)
        return tuple(parts) if kind is tuple else kind._make(parts)
    return PLACEHOLDER


class Placeholder:
    """Every operation on it gives the same placeholder, while items are dropped."""

    __hash__ = __iter__ = __contains__ = None  # type: ignore[assignment]
    __slots__ = ()

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absorb(self)

    def _refuse(self, *_: Any) -> Any:
        raise PlaceholderUsedError(_WHY)

    __bool__ = __str__ = __format__ = __reduce__ = _refuse

    @classmethod
    def __torch_function__(cls, *args: Any) -> Placeholder:
        return _absorb(PLACEHOLDER)


def _absorb(self: Placeholder, *args: Any, **kwargs: Any) -> Placeholder:
    if not (_left or FirstJump.is_open):
        raise PlaceholderUsedError(_WHY)
    return self


_WHY = (
    "a replay skips the items that the lost rank had used, and the script uses the value of one here: let the "
    "generator or iterator take its items by a `for` loop of its own"
)
_OPERATORS = """
    add sub mul matmul truediv floordiv mod pow and or xor lshift rshift radd rsub rmul rmatmul rtruediv rfloordiv rmod
    rpow rand ror rxor neg pos abs invert eq ne lt le gt ge call getitem setitem enter exit
    copy deepcopy
"""
for _name in _OPERATORS.split():
    setattr(Placeholder, f"__{_name}__", _absorb)
PLACEHOLDER = Placeholder()
