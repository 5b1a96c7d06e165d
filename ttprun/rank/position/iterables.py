"""What a loop under way runs over, as far as its position does not tell how that stands.

An iterator that Python makes stands where its position says. But a DataLoader's iterator begins at the right batch by
itself in a replay, and then nobody has asked what is around it for its items: the counts that a generator keeps, or an
`islice` that a library's generator runs over. So what is around it is recorded like a value of the script's, and what
cannot be made to stand as in the lost rank is refused.
"""

from __future__ import annotations

import csv
import gc
import inspect
import io
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ttprun.rank.position.frames import is_user_class, is_user_file
from ttprun.rank.position.iterator_seek import PLAIN, parts_of, reaches, unwrapped
from ttprun.rank.position.loops import Jump, Loop


def over(loop: Loop) -> Any:
    """The value to record with a loop: a generator or file that it runs over, or a tuple of what is inside of others.

    None if its position tells all.
    """
    if loop.over is not None or loop.tells_all:
        return loop.over
    items = loop.items()
    if items is None:
        return None
    loop.tells_all = _is_plain_for_good(items)
    return tuple(_within(items)) or None


def followed(loops: Iterable[Loop]) -> set[int]:
    """Ids of the iterators and files whose place is known from that of a loop that asks them."""
    found: set[int] = set()
    for loop in loops:
        value = over(loop)
        if type(value) is tuple:
            found |= ids_of_generators(value)
        elif value is not None:
            found |= {id(value), *map(id, _below(value))}
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


def _within(items: Any) -> Iterator[Any]:
    items = unwrapped(items)
    if type(items) in PLAIN or isinstance(items, _BaseDataLoaderIter):
        return
    parts = parts_of(items)
    for part in parts:
        yield from _within(part)
    if not parts and (_is_of_user(items) or _has_loader(items)):
        yield items


def _is_plain_for_good(items: Any) -> bool:
    """Whether nothing is within, now and later: an islice lets go of what it runs over, and a chain goes on."""
    items = unwrapped(items)
    if type(items) in PLAIN or isinstance(items, _BaseDataLoaderIter):
        return True
    parts = parts_of(items)
    return type(items) in (zip, map, filter, enumerate) and bool(parts) and all(map(_is_plain_for_good, parts))


def _is_of_user(items: Any) -> bool:
    if isinstance(items, GeneratorType):
        return is_user_file(items.gi_code.co_filename)
    return is_user_class(type(items))


def _has_loader(items: Any) -> bool:
    """Whether it holds a DataLoader or an iterator of one, however deep; True also if that would take long to tell."""
    return reaches(items, lambda value: isinstance(value, DataLoader | _BaseDataLoaderIter), if_long=True)


def on_stack(generator: GeneratorType[Any, Any, Any]) -> list[Any]:
    """The iterators that the `for` loops of a suspended generator run over, but for those that are followed."""
    found = [held for held in gc.get_referents(generator) if hasattr(type(held), "__next__")]
    cells = generator.gi_code.co_cellvars + generator.gi_code.co_freevars
    known = [value for name, value in inspect.getgeneratorlocals(generator).items() if name not in cells]
    for value in (*known, generator.gi_yieldfrom):
        at = next((at for at, held in enumerate(found) if held is value), None)
        if at is not None:
            del found[at]
    return [held for held in found if not (isinstance(held, GeneratorType) and held.gi_code in _OUR_OWN)]


_OUR_OWN = frozenset({Loop._follow.__code__, Jump._follow.__code__})
