"""Who holds what: written by the agent to `topology.json`, read by `ttprun topology` and by anybody's scripts.

The names follow ColossalAI's process group mesh: the group tp0 is the first one along the dimension tp.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Loss = Literal["peer", "buddy", "snapshot", "restart"]


@dataclass(frozen=True)
class RankTopology:
    """One rank.

    coordinates   dimension -> its place in its group there
    replicas      index of its group in the topology's `replicas`
    loss          where a replacement would get what it held: peer: from one of that group; buddy: from the mirror
                  that it keeps in shared memory; snapshot: all ranks go back to the newest one; restart: all ranks
                  start again, from what the script has saved
    """

    rank: int
    coordinates: dict[str, int]
    replicas: int
    loss: Loss


@dataclass(frozen=True)
class Topology:
    """Who holds what in a run.

    boundary   step before which the ranks were compared
    groups     name -> ranks of each process group of some of the ranks: dp0, dp1, tp0, ...
    replicas   ranks that hold the same, group by group
    apart      names of the parameters that not all ranks hold alike
    """

    boundary: int
    groups: dict[str, tuple[int, ...]]
    replicas: tuple[tuple[int, ...], ...]
    apart: tuple[str, ...]
    ranks: tuple[RankTopology, ...]

    def peers(self, rank: int) -> tuple[int, ...]:
        """The other ranks that hold all that this one holds."""
        return tuple(other for other in self.replicas[self.ranks[rank].replicas] if other != rank)

    def to_json(self) -> str:
        """One JSON document on one line."""
        return json.dumps(asdict(self))


def write_topology(path: Path, topology: Topology) -> None:
    """Replace the file at once. Raises OSError."""
    write_topology_json(path, topology.to_json())


def write_topology_json(path: Path, text: str) -> None:
    """The same with what `to_json` gave."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_topology(path: Path) -> Topology:
    """What was written last. Raises OSError if there is no such file, ValueError if it is something else."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        ranks = tuple(RankTopology(**rank) for rank in raw["ranks"])
        groups = {name: tuple(members) for name, members in raw["groups"].items()}
        return Topology(raw["boundary"], groups, tuple(map(tuple, raw["replicas"])), tuple(raw["apart"]), ranks)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the topology of a run: {error}") from error
