"""What a loop under way runs over, as far as its position does not tell how that stands.

In a replay a loop asks for the items before its own, so what Python and libraries put around them counts on by itself.
But a generator of the user's begins in the middle of a loop of its own, and what an object of the user's makes of items
is not made of placeholders. So these are recorded like values of the script's.
"""

from __future__ import annotations

import csv
import gc
import io
import itertools
from collections.abc import Iterable, Iterator
from types import CellType, GeneratorType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ttprun.rank.position.loops import Loop
from ttprun.rank.position.whose import holds_state, is_state

_LOOKED_INTO = (tuple, list, dict, CellType)  # beside iterators
_MOST = 200  # values
# What holds nothing but its place.
_EMPTY: tuple[Any, ...] = ([], (), "", b"", {}, {}.items(), {}.values(), set(), range(0), range(1 << 70), reversed([]))
_PLAIN = (*map(type, map(iter, _EMPTY)), itertools.count, itertools.repeat, _BaseDataLoaderIter)
_LASTING = (*_PLAIN, zip, map, filter, enumerate)  # and what holds on to what it runs over


def over(loop: Loop) -> Any:
    """The value to record with a loop: a generator or file that it runs over, or a tuple of what is inside of others.

    None if its position tells all.
    """
    if loop.tells_all:
        return None
    if loop.over is not None and (_is_of_user(loop.over) or not isinstance(loop.over, GeneratorType)):
        return loop.over
    found = list(_iterators_in(loop.items()))
    loop.tells_all = bool(found) and all(isinstance(one, _LASTING) for one in found)
    return tuple(one for one in found if _is_of_user(one) or _is_first_round(one)) or None


def followed(loops: Iterable[Loop]) -> set[int]:
    """Ids of the iterators and files whose place is known from that of a loop that asks them."""
    found: set[int] = set()
    for loop in loops:
        value = over(loop)
        if value is not None and type(value) is not tuple:
            found |= {id(value), *map(id, _below(value))}
        elif not loop.tells_all:
            found |= ids_of_generators(_iterators_in(loop.items()))
    return found


def _below(table: Any) -> list[Any]:
    """What a reader of tables reads: the reader within, and its file."""
    if isinstance(table, csv.DictReader):
        return [table.reader, *_below(table.reader)]
    if isinstance(table, type(csv.reader(()))):
        return [part for part in gc.get_referents(table) if isinstance(part, io.IOBase)]
    return []


def ids_of_generators(values: Iterable[Any]) -> set[int]:
    """Ids of the generators among some iterators: of another one, what it tells of itself must do."""
    return {id(value) for value in values if isinstance(value, GeneratorType)}


def _iterators_in(items: Any) -> Iterator[Any]:
    """An iterator, and those that it is made of; what is inside of one of the user's is recorded with that."""
    seen: set[int] = set()
    left = [items]
    while left and len(seen) <= _MOST:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        is_iterator = hasattr(type(value), "__next__")
        if is_iterator:
            yield value
        is_plain = isinstance(value, _PLAIN) or (is_iterator and _is_of_user(value))
        is_long = isinstance(value, tuple | list | dict) and len(value) > _MOST
        if not (is_plain or is_long) and (is_iterator or isinstance(value, _LOOKED_INTO)):
            left += gc.get_referents(value)


def _is_of_user(items: Any) -> bool:
    if isinstance(items, GeneratorType):
        return holds_state(items.gi_code.co_filename)
    return is_state(type(items))


def _is_first_round(items: Any) -> bool:
    """Whether it is a cycle that still gathers its items, and in a replay it would gather placeholders."""
    return isinstance(items, itertools.cycle) and any(
        isinstance(one, GeneratorType | _BaseDataLoaderIter) or _is_of_user(one) for one in _iterators_in(items)
    )
