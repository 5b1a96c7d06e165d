"""Reads of the script's objects that these cannot notice: what every walk over them is made of.

An object can run code of its own when it is iterated over, compared, hashed, printed or asked for an attribute, and
also in `isinstance`, which asks it for `__class__`. So nothing here asks the object: its type answers, and the type's
base in C reads what it holds. Standard library only; torch's own ways of noticing are in tensor_bytes.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeGuard, TypeVar, overload

T = TypeVar("T")
V = TypeVar("V")
_ORDERED: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
    (complex, complex.__complex__),
)
# What a class says of itself, though its metaclass may answer otherwise, or notice.
dictionary_of_class: Callable[[type], types.MappingProxyType[str, Any]] = vars(type)["__dict__"].__get__
bases_of: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__  # itself first, object last
base_of_class: Callable[[type], type] = vars(type)["__base__"].__get__
module_of_class: Callable[[type], str] = vars(type)["__module__"].__get__
qualified_name_of_class: Callable[[type], str] = vars(type)["__qualname__"].__get__
size_of_objects: Callable[[type], int] = vars(type)["__basicsize__"].__get__
_dictionary_offset: Callable[[type], int] = vars(type)["__dictoffset__"].__get__
_OF_DICTIONARIES = (types.GetSetDescriptorType, types.MemberDescriptorType)
_MOST_TYPES = 4096  # a script may make classes in each step
_cached: list[Any] = []


@overload
def is_a(value: Any, kind: type[T]) -> TypeGuard[T]: ...


@overload
def is_a(value: Any, kind: Any) -> bool: ...


def is_a(value: Any, kind: Any) -> bool:
    """`isinstance` by the value's true type; a proxy is what it is, not what it stands for."""
    return issubclass(type(value), kind)


def base_of(value: Any) -> Any:
    """The base class that knows the order of a dictionary."""
    return OrderedDict if issubclass(type(value), OrderedDict) else dict


def pairs_of(value: Any) -> list[tuple[Any, Any]]:
    """The items of a dictionary of any class."""
    return list(base_of(value).items(value))


def values_of(value: Any) -> list[Any]:
    """The values of a dictionary of any class."""
    return list(base_of(value).values(value))


def items_of(value: Any) -> list[Any]:
    """The items of a list, tuple, deque or set of any class."""
    base = next(base for base in _ORDERED if issubclass(type(value), base))
    return list(base.__iter__(value))


def plain_of(value: Any) -> Any:
    """A number or text of a subclass as one of the base class; None and what is plain already are returned."""
    plain = next((plain for base, plain in _SCALARS if issubclass(type(value), base)), None)
    return value if plain is None or type(value) is bool else plain(value)


def length_of(value: Any) -> int:
    """The number of items in a list, tuple, deque, set or dictionary of any class."""
    return int(next(base for base in (*_ORDERED, dict) if issubclass(type(value), base)).__len__(value))


def of_types(function: Callable[[type], V]) -> Callable[[type], V]:
    """A decorator: cache a function of a type, of the newest types, until the run of the script is over."""
    cached = functools.lru_cache(_MOST_TYPES)(function)
    _cached.append(cached)
    return cached


def forget() -> None:
    """The run of the script is over: its types may be made again."""
    for cached in _cached:
        cached.cache_clear()


@of_types
def slots_of(kind: type) -> dict[str, Any]:
    """The slots of a class and its bases, by name."""
    return {
        name: item
        for base in reversed(bases_of(kind))
        if "__slots__" in dictionary_of_class(base)
        for name, item in dictionary_of_class(base).items()
        if type(item) is types.MemberDescriptorType and name != "__weakref__"
    }


def has_method(kind: type, name: str) -> bool:
    """Whether a class or a base of it defines a name."""
    return any(name in dictionary_of_class(base) for base in bases_of(kind))


def has_dictionary(kind: type) -> bool:
    """Whether objects of a class have a dictionary of their own."""
    return bool(_dictionary_offset(kind))


@of_types
def dictionary_getter(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    if issubclass(kind, threading.local):  # each thread has another one, which the class does not have
        return lambda value: threading.local.__getattribute__(value, "__dict__")
    descriptors = (dictionary_of_class(base).get("__dict__") for base in bases_of(kind))
    getter = next((descriptor for descriptor in descriptors if type(descriptor) in _OF_DICTIONARIES), None)
    return None if getter is None else getter.__get__


def dictionary_of(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes itself; None if it has none."""
    get = dictionary_getter(type(value))
    return None if get is None else get(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """All attributes that an object itself holds."""
    attributes = dictionary_of(value)
    slots = slots_of(type(value))
    if not slots:
        return attributes or {}
    attributes = dict(attributes or {})
    for name, slot in slots.items():
        try:
            attributes[name] = slot.__get__(value)
        except AttributeError:
            continue  # it is empty
    return attributes


# The state of one of Python's own iterators, by its `__reduce__` and `__setstate__`.
#
# Those of itertools warn in Python 3.12 and 3.13 that they will be removed in 3.14; the warnings are suppressed,
# since the script may turn warnings into errors.

_WARNS = (3, 12) <= sys.version_info < (3, 14)


def state_of_iterator(items: Any) -> Any:
    """The result of `__reduce__`. Raises TypeError if it has none."""
    with _unwarned(items):
        return items.__reduce__()


def set_state_of_iterator(items: Any, state: Any) -> None:
    """Set an iterator to a state from `reduce`."""
    with _unwarned(items):
        items.__setstate__(state)


def _unwarned(items: Any) -> contextlib.AbstractContextManager[Any]:
    if _WARNS and type(items).__module__ == "itertools":
        return warnings.catch_warnings(action="ignore", category=DeprecationWarning)
    return contextlib.nullcontext()


# Futures that the script was given in place of what a thread does: a replacement has one that is done.

# By id: a future of the script's would notice that it is hashed. -> (the future, weakly, for what it stands)
_futures: dict[int, tuple[weakref.ref[Future[Any]], str]] = {}


def know_future(future: Future[Any], what: str) -> None:
    """The script gets this future.

    what   it stands for; of a save the place to which it is written
    """
    key = id(future)
    _futures[key] = weakref.ref(future, lambda _: _futures.pop(key, None)), what


def what_of_future(future: Any) -> str | None:
    """What one of these futures stands for; None for any other."""
    reference, what = _futures.get(id(future), (None, None))
    return what if reference is not None and reference() is future else None


def done_future(what: str) -> Future[Any]:
    """One whose work is done, without a result."""
    future: Future[Any] = Future()
    future.set_result(None)
    know_future(future, what)
    return future


def given_up(where: str) -> str:
    """A save whose thread could not end."""
    return f"the checkpoint that dcp.async_save was writing ({where}) is given up: the ranks had to connect again"


def forget_futures() -> None:
    """The run of the script is over."""
    _futures.clear()
