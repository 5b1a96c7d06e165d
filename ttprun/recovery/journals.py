"""Whether the survivors have issued the same collectives: otherwise they would wait for each other for ever on resume.

A rank that leaves one out, or issues another, may be seen only as a connection on which nothing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which the journals of a group differ.

    ranks     that differ from the majority; () if there is none
    sentence  for an operator
    """

    ranks: tuple[int, ...]
    sentence: str


def find_difference(issued: Mapping[int, Mapping[str, Sequence[str]]]) -> Difference | None:
    """Compare the collectives of ranks that stand at one boundary; None if they agree as far as they have come.

    issued   rank -> group -> signatures of the collectives that it has issued since the boundary, oldest first
    """
    by_group: dict[str, dict[int, Sequence[str]]] = {}
    for rank, journal in sorted(issued.items()):
        for group, signatures in journal.items():
            by_group.setdefault(group, {})[rank] = signatures
    for _, journals in sorted(by_group.items()):
        for at in range(max(map(len, journals.values()))):
            here = {rank: signatures[at].strip() for rank, signatures in journals.items() if len(signatures) > at}
            (usual, times), *others = Counter(here.values()).most_common()
            if others:
                odd = tuple(rank for rank, signature in here.items() if signature != usual)
                first, other = odd[0], next(rank for rank, signature in here.items() if signature == usual)
                what = f"rank {first} has issued '{here[first]}' where rank {other} has '{usual}'"
                return Difference(odd if 2 * times > len(here) else (), f"{what}, as number {at + 1} of the step")
    return None
