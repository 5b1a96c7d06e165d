"""Objects of compiled extensions: state that is not in Python attributes, by the protocols that such objects have.

A simulator or decoder tells its state by `__getstate__` and takes one by `__setstate__`, or by a pair of methods of
other names (PAIRS). The state is written as plain values and put into the object that the replay has made; then it is
asked for again, since some (pybind11's) pass over a second `__setstate__` without a word. What has no such pair is
compared by what it would give to pickle, or named as not proved. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

PAIRS = (
    ("__getstate__", "__setstate__"),
    ("clone_state", "restore_state"),
    ("cloneState", "restoreState"),
    ("get_state", "set_state"),
    ("getstate", "setstate"),
    ("state_dict", "load_state_dict"),
)
_POINTER = 8


class Pair:
    """An adapter by two methods of the object's own."""

    def __init__(self, get: str, put: str) -> None:
        self._get, self._put = get, put

    def record(self, value: Any) -> Any:
        return getattr(value, self._get)()

    def restore(self, value: Any, state: Any) -> None:
        getattr(value, self._put)(state)
        if self.record(value) != state:
            raise ValueError(f"{self._put} has not taken the state over")


def pair_of(kind: type) -> Pair | None:
    """How the objects of a type that hides state tell it; None if they hide none, or do not tell."""
    if not hides_state(kind):
        return None
    for get, put in PAIRS:
        if getattr(kind, get, None) is not getattr(object, get, None) and callable(getattr(kind, put, None)):
            return Pair(get, put)
    return None


def hides_state(kind: type) -> bool:
    """Whether objects hold more than attributes and slots of Python's: then a part of them was compiled."""
    return any(_own_bytes(base) > 0 for base in kind.__mro__[:-1])


def _own_bytes(kind: Any) -> int:
    """Bytes that a class adds to its base's objects beside slots, dictionary and weak references."""
    held = vars(kind)
    names = held.get("__slots__", ())
    slots = [one for one in held.values() if type(one).__name__ == "member_descriptor"] if names else []
    expected = len(slots) + ("__dict__" in held) + ("__weakref__" in held)
    return int(kind.__basicsize__ - kind.__base__.__basicsize__ - _POINTER * expected)
