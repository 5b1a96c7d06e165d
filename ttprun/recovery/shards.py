"""Who holds the same shard of the optimizer's state as whom, and so who sends what to whom: pure, for `--mindio`.

A framework declares for each rank the groups over which its optimizer is spread: ranks, and how many copies of the
whole state they hold together. With two copies the group is cut in two halves, and rank i of the one holds what rank i
of the other holds. Begin with `plan_repair`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Ranks that hold an optimizer's state together.

    ranks    in the group's order
    copies   of the whole state that they hold together; a divisor of their number
    shift    places from a rank to the next that holds the same; 0: a whole copy further
    """

    ranks: tuple[int, ...]
    copies: int
    shift: int = 0

    def holders(self, rank: int) -> tuple[int, ...]:
        """The other ranks that hold the same shard, the next higher rank first."""
        size = len(self.ranks)
        offset = self.shift or size // self.copies
        place = self.ranks.index(rank)
        peers = (self.ranks[(place + turn * offset) % size] for turn in range(1, self.copies))
        return tuple(other for other in dict.fromkeys(peers) if other != rank)

    def whole_copy(self, living: Sequence[int]) -> tuple[int, ...] | None:
        """Living ranks that hold the whole state together, one for each shard; None if a shard has none."""
        chosen: list[int] = []
        seen: set[int] = set()
        for rank in self.ranks:
            if rank in seen:
                continue
            alike = (rank, *self.holders(rank))
            seen.update(alike)
            holder = next((other for other in alike if other in living), None)
            if holder is None:
                return None
            chosen.append(holder)
        return tuple(chosen)


class LossKind(Enum):
    """What a lost rank needs."""

    PROCESS = "process"  # another process, which holds nothing
    MEMORY = "memory"  # the same process, whose device has lost memory that held state
    NOTHING = "nothing"  # the same process, which has lost nothing that is kept


class RepairRole(Enum):
    """A rank's part in a repair."""

    SEND = "send"
    RECEIVE = "receive"
    RECEIVE_IN_PLACE = "receive in place"
    KEEP = "keep"
    LOAD = "load"
    LOAD_IN_PLACE = "load in place"


@dataclass(frozen=True, slots=True)
class RepairTask:
    """What one rank does.

    kinds, sources, targets   of each transfer: place of the group among those declared, who sends, who receives
    ranks                     all that send or receive in this repair
    """

    role: RepairRole
    kinds: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """A repair.

    parts     by rank
    missing   ranks whose shards no living rank holds: all load a checkpoint then
    """

    parts: Mapping[int, tuple[RepairTask, ...]]
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Transfer:
    kind: int
    source: int
    target: int


def who_leaves(groups: Mapping[int, Sequence[Sequence[int]]], gone: Collection[int]) -> tuple[int, ...]:
    """Ranks that cannot train without those that are gone, and these.

    groups   rank -> its data-parallel groups, one for each kind of parameters, in the same order in all ranks
    gone     ranks that are lost, or have left before

    Ranks at the same place of their groups hold one replica of the model together: those at the place of a lost one
    leave too, as in MindIO.
    """
    kinds = range(max((len(of_rank) for of_rank in groups.values()), default=0))
    by_kind = [{tuple(of_rank[kind]) for of_rank in groups.values() if len(of_rank) > kind} for kind in kinds]
    leaving, before = set(gone), -1
    while len(leaving) > before:
        before = len(leaving)
        for of_kind in by_kind:
            places = {group.index(rank) for group in of_kind for rank in leaving if rank in group}
            leaving |= {group[place] for group in of_kind for place in places if place < len(group)}
    return tuple(sorted(leaving))


def plan_repair(
    groups: Mapping[int, Sequence[ReplicaGroup]],
    lost: Mapping[int, LossKind],
    world_size: int,
    away: Collection[int] = (),
) -> RepairPlan:
    """Say who sends what to whom.

    groups   declared by each rank; a rank that has declared nothing holds what all the others hold
    lost     what each lost rank needs
    away     ranks that have no part in it
    """
    transfers: list[_Transfer] = []
    missing: list[int] = []
    for rank, loss in lost.items():
        if loss is LossKind.NOTHING:
            continue
        for kind, group in enumerate(groups_of(groups, rank, world_size)):
            source = next((holder for holder in group.holders(rank) if holder not in lost and holder not in away), None)
            if source is None:
                missing.append(rank)
            else:
                transfers.append(_Transfer(kind, source, rank))
    if missing:
        present = tuple(rank for rank in range(world_size) if rank not in away)
        all_load = {
            rank: (
                RepairTask(
                    RepairRole.LOAD_IN_PLACE if lost.get(rank) is LossKind.MEMORY else RepairRole.LOAD,
                    kinds=(0,),
                    sources=(rank,),
                    targets=(rank,),
                    ranks=present,
                ),
            )
            for rank in present
        }
        return RepairPlan(all_load, tuple(dict.fromkeys(missing)))
    ranks = tuple(sorted({transfer.source for transfer in transfers} | {transfer.target for transfer in transfers}))
    parts: dict[int, tuple[RepairTask, ...]] = {}
    for source in sorted({transfer.source for transfer in transfers}):
        parts[source] = (
            _part(RepairRole.SEND, [transfer for transfer in transfers if transfer.source == source], ranks),
        )
    for rank, loss in lost.items():
        of_rank = [transfer for transfer in transfers if transfer.target == rank]
        if loss is LossKind.NOTHING:
            kinds = range(len(groups_of(groups, rank, world_size)))
            of_rank = [_Transfer(kind, rank, rank) for kind in kinds]
            parts[rank] = (_part(RepairRole.KEEP, of_rank, (rank,)),)
        elif of_rank:
            role = RepairRole.RECEIVE if loss is LossKind.PROCESS else RepairRole.RECEIVE_IN_PLACE
            parts[rank] = (_part(role, of_rank, ranks),)
    return RepairPlan(parts)


def groups_of(groups: Mapping[int, Sequence[ReplicaGroup]], rank: int, world_size: int) -> Sequence[ReplicaGroup]:
    """What a rank has declared, or else that all ranks hold the same.

    groups   rank -> the groups that it has declared; a rank without is not in it
    """
    return groups.get(rank) or (ReplicaGroup(tuple(range(world_size)), world_size),)


def plan_dump(
    groups: Mapping[int, Sequence[ReplicaGroup]], living: Sequence[int], world_size: int
) -> dict[int, list[tuple[int, tuple[int, ...]]]] | str:
    """Say who saves what.

    groups   as for `plan_repair`
    living   ranks that can save
    returns  rank -> [(place of the group among those declared, ranks that save it)], or a sentence that says why not: a
             shard of which no copy is left
    """
    saves: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    of_all = {
        (kind, group) for rank in range(world_size) for kind, group in enumerate(groups_of(groups, rank, world_size))
    }
    for kind, group in sorted(of_all, key=lambda item: (item[0], item[1].ranks)):
        chosen = group.whole_copy(living)
        if chosen is None:
            return f"for a shard of ranks {', '.join(map(str, group.ranks))} no copy is left"
        for rank in chosen:
            saves.setdefault(rank, []).append((kind, chosen))
    return saves


def _part(role: RepairRole, transfers: Iterable[_Transfer], ranks: tuple[int, ...]) -> RepairTask:
    listed = tuple(transfers)
    return RepairTask(
        role,
        kinds=tuple(transfer.kind for transfer in listed),
        sources=tuple(transfer.source for transfer in listed),
        targets=tuple(transfer.target for transfer in listed),
        ranks=ranks,
    )
