"""Which old rank a new one continues: the one that was like it when both had set themselves up.

Random generators that differ between the ranks (seeded with the data-parallel rank, say) show at the first step which
ranks train on the same data. Ranks of one tensor-parallel group do, so in another layout they must continue ranks that
did so, too. Begin with `closest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ttprun.capture.records.boundary_record import Record
from ttprun.capture.records.nodes import NumpyRandomNode, RandomNode
from ttprun.capture.records.packing import pack
from ttprun.capture.replay.combined import state_of
from ttprun.capture.values import Tree
from ttprun.introspect.random_state import RngState

MOST = 64  # old ranks that are looked at


@dataclass(frozen=True)
class OldRank:
    """Two records of a rank of the old run: of its first step, and of its last one."""

    first: Record
    last: Record


@dataclass(frozen=True)
class Closest:
    """What was found out.

    rank     the old rank; None: none was like this one, or all were
    seeds    of this one's generators, if it is like none, and some old ranks were like each other: what it would go on
             with, another rank has, too; b"": else
    """

    rank: int | None
    seeds: bytes = b""


def closest(old: Sequence[OldRank], mine: Tree, rng: RngState, default: int) -> Closest:
    """Compare the random generators of the first records with this rank's after its set-up: those that training uses.

    mine      its record of the same place in the script
    rng       the states of its global generators there
    default   the rank that is taken among equals
    """
    firsts = [_generators(Tree(*rank.first), rank.first.fields.rng) for rank in old]
    lasts = [_generators(Tree(*rank.last), rank.last.fields.rng) for rank in old]
    here = _generators(mine, rng)
    telling = [
        place
        for place in firsts[0]
        if any(first.get(place) != firsts[0][place] for first in firsts)
        and any(first.get(place) != last.get(place) for first, last in zip(firsts, lasts, strict=True))
    ]
    # The others were not seeded, or are seeded with what no old rank was seeded with.
    seeded = [place for place in telling if any(first.get(place) == here.get(place) for first in firsts)]
    like_mine = [
        number for number, first in enumerate(firsts) if all(first.get(place) == here.get(place) for place in seeded)
    ]
    if seeded and like_mine:
        return Closest(default if default in like_mine else like_mine[0])
    are_shared = any(
        first.get(place) == other.get(place) for place in telling for first, other in combinations(firsts, 2)
    )
    # New ranks that train on the same data have the same seeds, and must draw the same: they continue the same rank.
    return Closest(0, pack([here.get(place) for place in telling])) if are_shared else Closest(None)


def _generators(tree: Tree, rng: RngState) -> dict[Any, Any]:
    """The states of the global random generators, and of those in variables: by scope and name."""
    states: dict[Any, Any] = dict(rng)
    for which, scope in (*enumerate(tree.variables), *tree.modules.items()):
        for name, node in scope.items():
            generator = tree.resolve(node)
            if isinstance(generator, RandomNode | NumpyRandomNode):
                states[which, name] = state_of(generator)
    return states
