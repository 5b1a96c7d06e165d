"""Who holds what, for `ttprun topology`: from the process groups that ranks report, and from what was compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from ttprun.observe.status import RankTopology, ShardedParameters, Topology
from ttprun.protocol.from_rank import Group
from ttprun.recovery import Job
from ttprun.recovery.replicas import Replicas
from ttprun.recovery.state_origins import if_lost

UNNAMED = "dim_"  # as torch describes the dimensions of a mesh without names


def topology_of(job: Job, groups: Iterable[Group], mirrors: Mapping[int, int] = MappingProxyType({})) -> Topology:
    """What is known of a job that was compared.

    groups      that ranks have reported; the same one may come several times
    mirrors     bytes of each rank's mirror
    """
    replicas, world_size = job.replicas, len(job.members)
    dimensions = dimensions_of(groups, world_size, replicas)
    coordinates: list[dict[str, int]] = [{} for _ in range(world_size)]
    named: dict[str, tuple[int, ...]] = {}
    for name, along in dimensions.items():
        dash = "" if name[-1].isalpha() else "_"
        for number, members in enumerate(along):
            named[f"{name}{dash}{number}"] = members
            for at, rank in enumerate(members):
                coordinates[rank][name] = at
    alike = replicas.groups or [tuple(range(world_size))]
    index_of = {rank: index for index, ranks in enumerate(alike) for rank in ranks}
    ranks = tuple(
        RankTopology(
            rank,
            coordinates[rank],
            index_of[rank],
            origin.place,
            mirrors.get(rank, 0),
            origin.source,
            str(origin.why),
        )
        for rank, origin in sorted(if_lost(job, alike).items())
    )
    parts = tuple(_parts_of(replicas))
    return Topology(replicas.compared_at or 0, named, tuple(alike), tuple(replicas.all_names), ranks, parts)


def _parts_of(replicas: Replicas) -> Iterator[ShardedParameters]:
    """Who holds which part: parameters that are held in the same way together."""
    held_so: dict[tuple[int, ...], list[str]] = {}
    for key, owners in replicas.unequal.items():
        held_so.setdefault(tuple(owners), []).append(replicas.names.get(key, key))
    for owners, names in held_so.items():
        holders: dict[int, list[int]] = {}
        for rank, owner in enumerate(owners):
            holders.setdefault(owner, []).append(rank)
        yield ShardedParameters(tuple(names), tuple(map(tuple, holders.values())))


def dimensions_of(
    groups: Iterable[Group], world_size: int, replicas: Replicas
) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """Dimension -> the groups along it, by their first ranks.

    A mesh names its dimensions, or else what is done along them: expert parallelism exchanges gradients by all_to_all
    between ranks that hold different parameters (ep), a pipeline sends between such ranks (pp), context parallelism
    does either between ranks that hold the same (cp). Other groups of the script's own are a dimension that is named
    after the distance of their ranks, if together they hold each rank once.
    """
    named: dict[str, set[tuple[int, ...]]] = {}
    others: dict[int, set[tuple[int, ...]]] = {}
    exchanging: set[tuple[int, ...]] = set()
    messages: set[tuple[int, int]] = set()
    for group in groups:
        ranks = tuple(group.ranks)
        if group.dimension and not group.dimension.startswith(UNNAMED):
            if 1 < len(ranks) < world_size:
                named.setdefault(group.dimension, set()).add(ranks)
            continue
        if 1 < len(ranks) < world_size:
            others.setdefault(ranks[1] - ranks[0], set()).add(ranks)
        if group.exchanges:
            exchanging.add(ranks)
        messages |= {(sender, receiver) for sender, receiver in group.messages}
    by_use = [(_use_of(exchanging, "ep", replicas), exchanging)]
    if {sender for sender, _ in messages} == {receiver for _, receiver in messages}:
        chains = _connected(messages)
        by_use.append((_use_of(chains, "pp", replicas), chains))
    taken = list(named.values())
    for name, partition in (*by_use, *((f"stride{stride}", partition) for stride, partition in sorted(others.items()))):
        each_once = sorted(rank for ranks in partition for rank in ranks) == [*range(world_size)]
        if name and each_once and partition not in taken:
            taken.append(named.setdefault(name, partition))
    return {name: sorted(partition) for name, partition in sorted(named.items())}


def _use_of(groups: Iterable[tuple[int, ...]], if_unequal: str, replicas: Replicas) -> str:
    """What groups are for that exchange gradients or send: `if_unequal`, if their members hold different parameters.

    returns  "" if they differ only in what a mesh has cut, which may be for another reason
    """

    def differ(owners: Sequence[int]) -> bool:
        return any(owners[rank] != owners[ranks[0]] for ranks in groups for rank in ranks)

    if any(map(differ, replicas.differing.values())):
        return if_unequal
    return "" if any(map(differ, replicas.shards.values())) else "cp"


def _connected(messages: Iterable[tuple[int, int]]) -> set[tuple[int, ...]]:
    """The ranks that messages connect, directly or through others."""
    chain_of: dict[int, set[int]] = {}
    for ends in messages:
        chain = set().union(*(chain_of.get(rank, {rank}) for rank in ends))
        chain_of.update(dict.fromkeys(chain, chain))
    return {tuple(sorted(chain)) for chain in chain_of.values()}
