"""What an active loop iterates over, if the loop's position does not determine its state.

In a replay a loop requests the items before its own, so iterators of Python and libraries around them advance by
themselves. But a generator of the user's begins in the middle of its own loop, and an object of the user's must not
compute with placeholders. So these are recorded like values of the script's.
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

from ttprun.capture.position.loops import Loop
from ttprun.introspect.looks import is_a, length_of
from ttprun.introspect.whose import is_script_code, is_state

_LOOKED_INTO = (tuple, list, dict, CellType)  # in addition to iterators
_MOST = 200  # values
# Types that hold nothing but a position.
_EMPTY: tuple[Any, ...] = ([], (), "", b"", {}, {}.items(), {}.values(), set(), range(0), range(1 << 70), reversed([]))
_PLAIN = (*map(type, map(iter, _EMPTY)), itertools.count, itertools.repeat, _BaseDataLoaderIter)
_LASTING = (*_PLAIN, zip, map, filter, enumerate)  # and those that keep what they iterate over


def over(loop: Loop) -> Any:
    """The value to record with a loop: the generator or file that it iterates over, or a tuple of iterators in that.

    None if its position determines everything.
    """
    if loop.determines_all:
        return None
    if loop.over is not None and (_is_of_user(loop.over) or not is_a(loop.over, GeneratorType)):
        return loop.over
    found = list(_iterators_in(loop.items()))
    loop.determines_all = bool(found) and all(is_a(one, _LASTING) for one in found)
    return _not_asked(found) or None


def followed(loops: Iterable[Loop]) -> set[int]:
    """Ids of the iterators and files whose position is known from the loop that uses them."""
    found: set[int] = set()
    for loop in loops:
        value = over(loop)
        if value is not None and type(value) is not tuple:
            found |= {id(value), *map(id, _below(value))}
        elif not loop.determines_all:
            found |= ids_of_generators(_iterators_in(loop.items()))
    return found


def inside_library(items: Any) -> tuple[Any, ...] | None:
    """Of the first iterable of a generator expression: the iterators to record in its place, as of a loop.

    None if no generator of a library is in it, so that it can be recorded itself.
    """
    found = list(_iterators_in(items))
    has_hidden = any(is_a(one, GeneratorType) and not _is_of_user(one) for one in found)
    return _not_asked(found) if has_hidden else None


def _not_asked(found: list[Any]) -> tuple[Any, ...]:
    return tuple(one for one in found if _is_of_user(one) or _is_first_round(one))


def _below(table: Any) -> list[Any]:
    """What a csv reader reads: the reader inside, and its file."""
    if is_a(table, csv.DictReader):
        return [table.reader, *_below(table.reader)]
    if isinstance(table, type(csv.reader(()))):
        return [part for part in gc.get_referents(table) if is_a(part, io.IOBase)]
    return []


def ids_of_generators(values: Iterable[Any]) -> set[int]:
    """Ids of the generators among some iterators."""
    return {id(value) for value in values if is_a(value, GeneratorType)}


def _iterators_in(items: Any) -> Iterator[Any]:
    """An iterator and those inside it; what is inside one of the user's is recorded with that."""
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
        is_plain = is_a(value, _PLAIN) or (is_iterator and _is_of_user(value))
        is_long = is_a(value, tuple | list | dict) and length_of(value) > _MOST
        if not (is_plain or is_long) and (is_iterator or is_a(value, _LOOKED_INTO)):
            left += gc.get_referents(value)


def _is_of_user(items: Any) -> bool:
    if is_a(items, GeneratorType):
        return is_script_code(items.gi_code.co_filename)
    return is_state(type(items))


def _is_first_round(items: Any) -> bool:
    """Whether it is a cycle in its first round, which would collect placeholders in a replay."""
    return is_a(items, itertools.cycle) and any(
        is_a(one, (GeneratorType, _BaseDataLoaderIter)) or _is_of_user(one) for one in _iterators_in(items)
    )
