"""Between nodes a list of all ranks of the job is an empty one: a report or order that each rank gets stays short.

An agent shortens what it sends (`shortened`), and the other one reads it in full (`in_full`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec.structs import replace

from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.to_rank import Freeze


def shortened(message: Any, world_size: int) -> Any:
    """The message as it is sent to another agent."""
    match message:
        case RankFrozen(journal=journal):
            names = [name for name, group in journal.items() if group.ranks == _all(world_size)]
            short = {name: replace(journal[name], ranks=[]) for name in names}
            return replace(message, journal=journal | short) if short else message
        case Freeze(ranks=ranks, lost=lost) if ranks == _but(lost, world_size):
            return replace(message, ranks=())
    return message


def in_full(message: Any, world_size: int) -> Any:
    """The message as it was before it was shortened."""
    match message:
        case RankFrozen(journal=journal):
            full = {name: replace(group, ranks=_all(world_size)) for name, group in journal.items() if not group.ranks}
            return replace(message, journal=journal | full) if full else message
        case Freeze(ranks=(), lost=lost):
            return replace(message, ranks=_but(lost, world_size))
    return message


@cache
def _all(world_size: int) -> list[int]:
    """One list for all reports: that of each rank would be as many as there are ranks, squared."""
    return list(range(world_size))


def _but(lost: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    gone = frozenset(lost)
    return tuple(rank for rank in range(world_size) if rank not in gone)
