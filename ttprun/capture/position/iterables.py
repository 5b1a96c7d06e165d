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
from ttprun.introspect.ownership import is_script_code, is_state
from ttprun.introspect.safe_reads import is_a, length_of

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
    iterators = list(_iterators_in(loop.items()))
    loop.determines_all = bool(iterators) and all(is_a(iterator, _LASTING) for iterator in iterators)
    return _not_asked(iterators) or None


def followed(loops: Iterable[Loop]) -> set[int]:
    """Ids of the iterators and files whose position is known from the loop that uses them."""
    ids: set[int] = set()
    for loop in loops:
        value = over(loop)
        if value is not None and type(value) is not tuple:
            ids |= {id(value), *map(id, _below(value))}
        elif not loop.determines_all:
            ids |= ids_of_generators(_iterators_in(loop.items()))
    return ids


def inside_library(items: Any) -> tuple[Any, ...] | None:
    """Of the first iterable of a generator expression: the iterators to record in its place, as of a loop.

    None if no generator of a library is in it, so that it can be recorded itself.
    """
    iterators = list(_iterators_in(items))
    has_hidden = any(is_a(iterator, GeneratorType) and not _is_of_user(iterator) for iterator in iterators)
    return _not_asked(iterators) if has_hidden else None


def _not_asked(iterators: list[Any]) -> tuple[Any, ...]:
    return tuple(iterator for iterator in iterators if _is_of_user(iterator) or _is_first_round(iterator))


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
    pending = [items]
    while pending and len(seen) <= _MOST:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        is_iterator = hasattr(type(value), "__next__")
        if is_iterator:
            yield value
        is_plain = is_a(value, _PLAIN) or (is_iterator and _is_of_user(value))
        is_long = is_a(value, tuple | list | dict) and length_of(value) > _MOST
        if not (is_plain or is_long) and (is_iterator or is_a(value, _LOOKED_INTO)):
            pending += gc.get_referents(value)


def _is_of_user(items: Any) -> bool:
    if is_a(items, GeneratorType):
        return is_script_code(items.gi_code.co_filename)
    return is_state(type(items))


def _is_first_round(items: Any) -> bool:
    """Whether it is a cycle in its first round, which would collect placeholders in a replay."""
    return is_a(items, itertools.cycle) and any(
        is_a(inner, (GeneratorType, _BaseDataLoaderIter)) or _is_of_user(inner) for inner in _iterators_in(items)
    )
