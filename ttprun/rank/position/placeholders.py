"""What stands in a replay for the items that the lost rank has used up.

A loop that a replay begins at item k asks what it runs over for the k items before, and drops them. So `enumerate`,
`zip`, `islice`, a progress bar or a generator in between counts on by itself, whatever it is made of. But nothing is
loaded for these items: what knows its own place, which is a DataLoader's iterator or a generator with a loop that
begins in its middle, hands out placeholders instead.

Whatever is computed from a placeholder is a placeholder, until the replay comes to the boundary whose record tells what
the script's variables hold. Code that needs to know what is in one fails, and so does all code that meets one later:
that ends the replay, with this reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

END = object()
_left = 0


class Way:
    """Of a replay, to its first recorded boundary.

    is_open   the replay is on it: what its variables hold will be written over
    """

    is_open = False


class PlaceholderUsedError(RuntimeError):
    """Code of the script needs an item that a replay passes over."""


def pass_over(iterable: Iterable[Any], count: int) -> Iterator[Any]:
    """An iterator of which the first `count` items are dropped."""
    global _left
    before, _left = _left, count
    try:
        items = iter(iterable)  # which may ask for an item already
        while _left and next(items, END) is not END:
            _left -= 1
    finally:
        _left = before
    return items


def wanted() -> int:
    """How many items the loop that is asking now will drop, the one that it asks for included."""
    return _left


def hand_out(of: Any = None, at_least: int = 0) -> Iterator[Any]:
    """Placeholders, as long as items are dropped, for all of these.

    of         an item: the placeholders are made of the same tuples, lists and dictionaries
    at_least   placeholders, if more items are asked for here than the loop drops: it may get some of them at a time
    """
    for _ in range(max(at_least, _left)):
        if not _left:
            return
        yield like(of)


def like(item: Any) -> Any:
    """A placeholder for an item that can be unpacked as the item can."""
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
    """Whatever is done with it while items are dropped gives the same placeholder."""

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
    if not (_left or Way.is_open):
        raise PlaceholderUsedError(_WHY)
    return self


_WHY = (
    "a replay passes over the items that the lost rank had used up, and here the script uses what is in one of them: "
    "what a generator or iterator makes of its items can be replayed if it takes them by a `for` loop of its own"
)
_OPERATORS = """
    add sub mul matmul truediv floordiv mod pow and or xor lshift rshift radd rsub rmul rmatmul rtruediv rfloordiv rmod
    rpow rand ror rxor neg pos abs invert eq ne lt le gt ge call getitem setitem enter exit
    copy deepcopy
"""
for _name in _OPERATORS.split():
    setattr(Placeholder, f"__{_name}__", _absorb)
PLACEHOLDER = Placeholder()
