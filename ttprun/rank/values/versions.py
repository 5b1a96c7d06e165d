"""Whether dictionaries are as they were, from the versions that CPython keeps of them (PEP 509, up to Python 3.12).

Whatever changes a dictionary gives it a version that no dictionary has had; setting an attribute does too, once the
object's `__dict__` has been asked for. To read it touches one word, where to look at what a dictionary holds touches
all of that. An interpreter without such versions is noticed, and there nothing is known to be as it was.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

_AT = 3 * ctypes.sizeof(ctypes.c_void_p)  # behind the object's head of two words, and the number of items
_value: Any = attrgetter("value")


def _version_of(dictionary: dict[Any, Any]) -> ctypes.c_uint64:
    """The version itself, to be read again and again as long as the dictionary lives."""
    return ctypes.c_uint64.from_address(id(dictionary) + _AT)


class _Probe:
    pass


def _are_kept() -> bool:
    """Whether this interpreter gives a dictionary another version with each kind of change."""
    if sys.version_info >= (3, 13) or sys.implementation.name != "cpython":
        return False
    probe = _Probe()
    of_object, plain = vars(probe), {"x": 0}
    watched = [_version_of(of_object), _version_of(plain)]
    seen = [one.value for one in watched]
    for number in range(64):  # as often as it takes the interpreter to choose its quickest way
        probe.x = number  # type: ignore[attr-defined]
        plain["x"] = number + 1
        now = [one.value for one in watched]
        if any(before == after for before, after in zip(seen, now, strict=True)):
            return False
        seen = now
    del plain["x"]
    del probe.x  # type: ignore[attr-defined]
    return all(one.value != before for one, before in zip(watched, seen, strict=True))


ARE_KEPT = _are_kept()


class Versions:
    """The versions of some dictionaries, which it keeps alive."""

    __slots__ = ("_dictionaries", "_seen", "_versions")

    def __init__(self, dictionaries: Iterable[dict[Any, Any]]) -> None:
        self._dictionaries = list(dictionaries)
        self._versions = [_version_of(one) for one in self._dictionaries] if ARE_KEPT else []
        self.note()

    def note(self) -> None:
        """How they are now is how they were from now on."""
        self._seen = list(map(_value, self._versions))

    def are_as_they_were(self) -> bool:
        """Whether it is known that none of them has changed since `note`."""
        return ARE_KEPT and list(map(_value, self._versions)) == self._seen

    def have_changed(self) -> bool:
        """Whether it is known that some of them has."""
        return list(map(_value, self._versions)) != self._seen
