"""Who holds what, for `ttprun topology`: from the process groups that ranks report, and from what was compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ttprun.observe.topology import Loss, RankTopology, Topology
from ttprun.protocol.from_rank import Group
from ttprun.recovery.replicas import Replicas


def topology_of(replicas: Replicas, groups: Iterable[Group], world_size: int, otherwise: Loss) -> Topology:
    """What is known of a job that was compared.

    groups      that ranks have reported; the same one may come several times
    otherwise   what the loss of a rank costs that no other rank can be the source of
    """
    dimensions = dimensions_of(groups, world_size)
    coordinates: list[dict[str, int]] = [{} for _ in range(world_size)]
    named: dict[str, tuple[int, ...]] = {}
    for name, found in dimensions.items():
        dash = "" if name[-1].isalpha() else "_"
        for number, members in enumerate(found):
            named[f"{name}{dash}{number}"] = members
            for at, rank in enumerate(members):
                coordinates[rank][name] = at
    alike = replicas.groups or [tuple(range(world_size))]
    index_of = {rank: index for index, ranks in enumerate(alike) for rank in ranks}
    ranks = tuple(
        RankTopology(rank, coordinates[rank], index, _loss_of(rank, alike[index], replicas, otherwise))
        for rank, index in sorted(index_of.items())
    )
    return Topology(replicas.compared_at or 0, named, tuple(alike), tuple(replicas.all_names), ranks)


def _loss_of(rank: int, alike: tuple[int, ...], replicas: Replicas, otherwise: Loss) -> Loss:
    if len(alike) > 1:
        return "peer"
    return "buddy" if rank in replicas.mirrored else otherwise


def dimensions_of(groups: Iterable[Group], world_size: int) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """Dimension -> the groups along it, by their first ranks.

    A mesh names its dimensions. Other groups of the script's own are a dimension, named after the distance of their
    ranks, if together they hold each rank once.
    """
    named: dict[str, set[tuple[int, ...]]] = {}
    others: dict[int, set[tuple[int, ...]]] = {}
    for group in groups:
        ranks = tuple(group.ranks)
        if not 1 < len(ranks) < world_size:
            continue
        if group.dimension:
            named.setdefault(group.dimension, set()).add(ranks)
        else:
            others.setdefault(ranks[1] - ranks[0], set()).add(ranks)
    for stride, found in sorted(others.items()):
        if sorted(rank for ranks in found for rank in ranks) == list(range(world_size)):
            named.setdefault(f"stride{stride}", found)
    return {name: sorted(found) for name, found in sorted(named.items())}
