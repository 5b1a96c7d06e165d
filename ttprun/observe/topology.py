"""Who holds what: written by the agent to `topology.json`, read by `ttprun topology` and by anybody's scripts.

The names follow ColossalAI's process group mesh: the group tp0 is the first one along the dimension tp.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

StateSource = Literal["peer", "buddy", "snapshot", "restart"]


@dataclass(frozen=True)
class RankTopology:
    """One rank.

    coordinates   dimension -> its place in its group there
    replicas      index of its group in the topology's `replicas`
    loss          where a replacement would get what it held: peer: from one of that group; buddy: from the mirror
                  that it keeps in shared memory; snapshot: all ranks go back to the newest one; restart: all ranks
                  start again, from what the script has saved
    mirror_bytes  memory of the node that its mirror takes; 0: it keeps none
    """

    rank: int
    coordinates: dict[str, int]
    replicas: int
    loss: StateSource
    mirror_bytes: int = 0


@dataclass(frozen=True)
class ShardedParameters:
    """Parameters that are held in the same way, and not alike by all ranks.

    holders   of each part, the ranks that hold it
    """

    names: tuple[str, ...]
    holders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """Who holds what in a run.

    boundary   step before which the ranks were compared
    groups     name -> ranks of each process group of some of the ranks: dp0, dp1, tp0, ...
    replicas   ranks that hold the same, group by group
    unequal    names of the parameters that not all ranks hold alike
    parts      who holds which part of these
    """

    boundary: int
    groups: dict[str, tuple[int, ...]]
    replicas: tuple[tuple[int, ...], ...]
    unequal: tuple[str, ...]
    ranks: tuple[RankTopology, ...]
    parts: tuple[ShardedParameters, ...] = ()

    def peers(self, rank: int) -> tuple[int, ...]:
        """The other ranks that hold all that this one holds."""
        return tuple(other for other in self.replicas[self.ranks[rank].replicas] if other != rank)

    def one_of_each_coordinate(self) -> list[int]:
        """Rank 0, the last one, and as few others as it takes to have each place of each dimension and each part."""
        places = [{*rank.coordinates.items(), ("", rank.replicas)} for rank in self.ranks]
        chosen = [*{0: None, len(places) - 1: None}]
        missing = set().union(*places).difference(*(places[rank] for rank in chosen))
        while missing:
            chosen.append(max(range(len(places)), key=lambda rank: len(places[rank] & missing)))
            missing -= places[chosen[-1]]
        return chosen

    def to_json(self) -> str:
        """One JSON document on one line."""
        return json.dumps(asdict(self))


def read_topology(path: Path) -> Topology:
    """What was written last. Raises OSError if there is no such file, ValueError if it is something else."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        ranks = tuple(RankTopology(**rank) for rank in raw["ranks"])
        groups = {name: tuple(members) for name, members in raw["groups"].items()}
        parts = tuple(
            ShardedParameters(tuple(part["names"]), tuple(map(tuple, part["holders"]))) for part in raw.get("parts", ())
        )
        return Topology(
            raw["boundary"], groups, tuple(map(tuple, raw["replicas"])), tuple(raw["unequal"]), ranks, parts
        )
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the topology of a run: {error}") from error
