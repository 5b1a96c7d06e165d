"""Functions of the user's that remember what they have given: `functools.lru_cache` and `functools.cache`.

[tag, number, function, arguments of each call kept, what each has given, node of the function], the oldest first. What
a cache holds is seen by the garbage collector alone, and only a call puts something in: to restore one, the calls are
made again, and for that time the function gives what was recorded in place of doing its work.
"""

from __future__ import annotations

import functools
import gc
import types
from typing import Any

from ttprun.rank.position.frames import is_user_file
from ttprun.rank.values.callables import record_named
from ttprun.rank.values.containers import nodes_of_items
from ttprun.rank.values.nodes import Tag, name_of, short_name
from ttprun.rank.values.not_proved import record_not_proved
from ttprun.rank.values.restore import Restore, told
from ttprun.rank.values.snapshot import Snapshot

Cache: Any = functools._lru_cache_wrapper


def _give(*args: Any, _ttprun_give: Any, **kwargs: Any) -> Any:
    return _ttprun_give()


def record_cache(snapshot: Snapshot, value: Cache, depth: int) -> Any:
    """A function with a cache: of a library's only the name."""
    function = value.__wrapped__
    if type(function) is not types.FunctionType or not is_user_file(function.__code__.co_filename):
        return record_named(snapshot, value, depth)
    held = _held(value)
    if held is None:
        return record_not_proved(snapshot, value, "what it has kept cannot be seen in this version of Python")
    number = snapshot.number(value)
    calls = nodes_of_items(snapshot, value, [_arguments(value, key) for key in held[0]], depth)
    given = nodes_of_items(snapshot, value, held[1], depth, 1)
    return [Tag.CACHE, number, name_of(function), calls, given, snapshot.node(function, depth + 1)]


def _held(value: Cache) -> tuple[list[Any], list[Any]] | None:
    """Keys and results, the oldest first; None if this interpreter lays them out in another way."""
    found = gc.get_referents(value)
    tables = [one for one in found if type(one) is dict and one is not vars(value)]
    if len(tables) != 1:
        return None
    (table,) = tables
    if value.cache_info().maxsize is None:
        return list(table), list(table.values())
    # Of each link in turn: key, result, and the type of links.
    links = [at for at, one in enumerate(found) if one is _LINK][: len(table)]
    keys, results = ([found[at - back] for at in links] for back in (2, 1))
    is_as_expected = len(keys) == len(table) and set(map(id, keys)) == set(map(id, table))
    return (keys, results) if is_as_expected else None


def _type_of_links() -> Any:
    """The type that stands behind each result among what a cache refers to."""
    probe = functools.lru_cache(1)(object)
    probe()
    return next((type(link) for one in gc.get_referents(probe) if type(one) is dict for link in one.values()), None)


_LINK = _type_of_links()


def _arguments(value: Cache, key: Any) -> Any:
    """The arguments of the call that a key stands for: (positional ones, (name, value, name, value...))."""
    if type(key) is not tuple:
        return key
    mark = next((at for at, one in enumerate(key) if type(one) is object), None)
    is_typed = value.cache_parameters()["typed"]
    if mark is None:
        return key[: len(key) // 2] if is_typed else key, ()
    rest = key[mark + 1 :]
    return key[:mark], rest[: 2 * (len(rest) - mark) // 3] if is_typed else rest


def restore_cache(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """Have the function of this name remember what the lost rank's did."""
    _, number, where, calls, given, function = node
    cache = getattr(live, "__func__", live) if isinstance(live, staticmethod | classmethod) else live
    if type(cache) is not Cache or name_of(cache.__wrapped__) != where:
        return restore.refuse(live, f"{name} is {short_name(where)} with a cache in the lost rank, {told(live)} here")
    if not restore.claim_or_refuse(number, cache, name):
        return live
    restore.value(cache.__wrapped__, function, name)
    held = _held(cache) or ([], [])
    known = [_arguments(cache, key) for key in held[0]]
    calls, given = restore.items(known, calls, name), restore.items(held[1], given, name)
    if len(calls) != len(given):
        return restore.refuse(live, f"{name} has kept what is not in the replacement and cannot be recorded")
    _fill(cache, calls, given)
    return live


def _fill(cache: Cache, calls: list[Any], given: list[Any]) -> None:
    function: Any = cache.__wrapped__
    own = function.__code__, function.__kwdefaults__
    cache.cache_clear()
    left = iter(given)
    try:
        function.__code__ = _give.__code__.replace(co_freevars=own[0].co_freevars)
        function.__kwdefaults__ = {"_ttprun_give": left.__next__}
        for call in calls:
            args, named = call if type(call) is tuple else ((call,), ())
            cache(*args, **dict(zip(named[::2], named[1::2], strict=True)))
    finally:
        function.__code__, function.__kwdefaults__ = own
