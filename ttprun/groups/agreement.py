"""What all members must know alike before the operations of an interrupted step are issued again.

Each member says what it has issued since the boundary (`generations.known`); whoever has heard all of them decides, or
each member for itself. Imports no torch: ranks are told by the agent. Begin with `Agreed.of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ttprun.protocol.from_rank import GroupJournal

Operation = tuple[str, int]  # group, number of a collective
Journals = Mapping[int, dict[str, GroupJournal]]  # by rank


class Agreed(NamedTuple):
    """For one member; see the attributes of Journal that have these names."""

    sources: dict[Operation, int]
    received: dict[str, list[str]]
    settled: dict[str, int]

    @classmethod
    def of(cls, rank: int, journals: Journals) -> Agreed:
        """What follows for `rank` from what all living members know."""
        found = list(journals.values())
        return cls(sources_of(journals), received_of(rank, found), settled_of(found))


def expected_of(rank: int, journals: list[dict[str, GroupJournal]]) -> dict[str, list[str]]:
    """The collectives, by group, that a replacement of `rank` has to issue: those of the survivor that is farthest."""
    expected: dict[str, list[str]] = {}
    for journal in journals:
        for name, group in journal.items():
            if rank in group.ranks and len(group.issued) > len(expected.get(name, [])):
                expected[name] = group.issued
    return expected


def received_of(rank: int, journals: list[dict[str, GroupJournal]]) -> dict[str, list[str]]:
    """By point-to-point channel, the digests of the messages to or from `rank` that their receivers have."""
    found = (item for journal in journals for item in journal.items())
    return {channel: group.received for channel, group in found if group.received and rank in group.ranks}


def settled_of(journals: list[dict[str, GroupJournal]]) -> dict[str, int]:
    """By group, how many of FSDP2's reduce-scatters need not be issued again: one rank that knows it is enough."""
    found: dict[str, int] = {}
    for name, group in (item for journal in journals for item in journal.items()):
        if group.settled:
            found[name] = max(found.get(name, 0), group.settled[-1] + 1)
    return found


def sources_of(journals: Journals) -> dict[Operation, int]:
    """(group, number of a collective) -> the lowest of the ranks that have its result and no input any more."""
    sources: dict[Operation, int] = {}
    for rank, journal in sorted(journals.items()):
        for name, group in journal.items():
            for number in group.results:
                sources.setdefault((name, number), rank)
    return sources
