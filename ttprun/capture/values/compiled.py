"""Objects of compiled extensions, whose state is not in Python attributes, by the protocols that such objects have.

A simulator or decoder returns its state by `__getstate__` and sets it by `__setstate__`, or by a pair of methods of
other names (PAIRS). The state is recorded as plain values and set on the object that the replay has made; then it is
read again, since some (pybind11's) silently ignore a second `__setstate__`. Objects without such a pair are compared by
their pickled state, or named as not proved. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

from ttprun.introspect.looks import base_of_class, bases_of, dictionary_of_class, size_of_objects

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
        """The state of an object."""
        return getattr(value, self._get)()

    def restore(self, value: Any, state: Any) -> None:
        """Set the state of an object. Raises ValueError if it has another one then."""
        getattr(value, self._put)(state)
        if self.record(value) != state:
            raise ValueError(f"{self._put} has not set the state")


def pair_of(kind: type) -> Pair | None:
    """The methods to read and set hidden state of a type's objects; None if they have none."""
    if not hides_state(kind):
        return None
    for get, put in PAIRS:
        if getattr(kind, get, None) is not getattr(object, get, None) and callable(getattr(kind, put, None)):
            return Pair(get, put)
    return None


def hides_state(kind: type) -> bool:
    """Whether objects hold more than Python's attributes and slots, as those of compiled extensions do."""
    return any(_own_bytes(base) > 0 for base in bases_of(kind)[:-1])


def _own_bytes(kind: Any) -> int:
    """Bytes that a class adds to its base's objects, without slots, dictionary and weak references."""
    attributes = dictionary_of_class(kind)
    names = attributes.get("__slots__", ())
    slots = [slot for slot in attributes.values() if type(slot).__name__ == "member_descriptor"] if names else []
    # A name that is there twice has two places.
    repeated = len(names) - len(set(names)) if isinstance(names, list | tuple) else 0
    expected = len(slots) + repeated + ("__dict__" in attributes) + ("__weakref__" in attributes)
    return int(size_of_objects(kind) - size_of_objects(base_of_class(kind)) - _POINTER * expected)
