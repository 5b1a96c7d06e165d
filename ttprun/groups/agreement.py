"""What all members must know alike before the operations of an interrupted step are issued again.

Each member says what it has issued since the boundary (`generations.known`); whoever has heard all of them decides, or
each member for itself. Imports no torch: the agent sends it to ranks. Begin with `Agreed.of`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
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
        return cls.of_each((rank,), journals)[rank]

    @classmethod
    def of_each(cls, ranks: Iterable[int], journals: Journals) -> dict[int, Agreed]:
        """The same for many members: what all know is looked through once."""
        sources, settled = sources_of(journals), settled_of(journals.values())
        received = received_of(journals.values())
        return {rank: cls(sources, received.get(rank, {}), settled) for rank in ranks}


def expected_of(journals: Iterable[dict[str, GroupJournal]]) -> dict[int, dict[str, list[str]]]:
    """Rank -> the collectives, by group, that a replacement has to issue: those of the survivor that is farthest."""
    farthest: dict[tuple[str, tuple[int, ...]], list[GroupJournal]] = {}  # one for each membership
    for name, group in (item for journal in journals for item in journal.items()):
        glance = (len(group.ranks), *group.ranks[:1], *group.ranks[-1:])
        alike = farthest.setdefault((name, glance), [])
        place = next(
            (at for at, member in enumerate(alike) if member.ranks is group.ranks or member.ranks == group.ranks), None
        )
        if place is None:
            alike.append(group)
        elif len(group.issued) > len(alike[place].issued):
            alike[place] = group
    expected: defaultdict[int, dict[str, list[str]]] = defaultdict(dict)
    for (name, _), groups in farthest.items():
        for rank, issued in ((rank, group.issued) for group in groups for rank in group.ranks):
            if len(issued) > len(expected[rank].get(name, [])):
                expected[rank][name] = issued
    return expected


def received_of(journals: Iterable[dict[str, GroupJournal]]) -> dict[int, dict[str, list[str]]]:
    """Rank -> by point-to-point channel, the digests of the messages to or from it that their receivers have."""
    received: defaultdict[int, dict[str, list[str]]] = defaultdict(dict)
    for channel, group in (item for journal in journals for item in journal.items() if item[1].received):
        for rank in group.ranks:
            received[rank][channel] = group.received
    return received


def settled_of(journals: Iterable[dict[str, GroupJournal]]) -> dict[str, int]:
    """By group, how many of FSDP's reduce-scatters need not be issued again: one rank that knows it is enough."""
    settled: dict[str, int] = {}
    for name, group in (item for journal in journals for item in journal.items()):
        if group.settled:
            settled[name] = max(settled.get(name, 0), group.settled[-1] + 1)
    return settled


def sources_of(journals: Journals) -> dict[Operation, int]:
    """(group, number of a collective) -> the lowest of the ranks that have its result and no input any more."""
    sources: dict[Operation, int] = {}
    for rank, journal in sorted(journals.items()):
        for name, group in journal.items():
            for number in group.results:
                sources.setdefault((name, number), rank)
    return sources
