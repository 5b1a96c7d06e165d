"""Who sends what to whom, and who saves, when an optimizer's state is spread over ranks."""

from __future__ import annotations

import pytest

from ttprun.recovery.shards import LossKind, RepairRole, ReplicaGroup, plan_dump, plan_repair, who_leaves

HALVES = ReplicaGroup((0, 2, 4, 6), copies=2)
OTHER_HALVES = ReplicaGroup((1, 3, 5, 7), copies=2)
EIGHT = {rank: [HALVES if rank % 2 == 0 else OTHER_HALVES] for rank in range(8)}


@pytest.mark.parametrize(
    ("group", "rank", "holders"),
    [
        (HALVES, 0, (4,)),
        (HALVES, 6, (2,)),
        (ReplicaGroup((0, 1, 2, 3), copies=4), 1, (2, 3, 0)),
        (ReplicaGroup((0, 1, 2, 3), copies=1), 1, ()),
        (ReplicaGroup((0, 1, 2, 3), copies=2, shift=1), 1, (2,)),
    ],
)
def test_the_same_shard_lies_at_the_same_place_of_the_other_copies(
    group: ReplicaGroup, rank: int, holders: tuple[int, ...]
) -> None:
    assert group.holders(rank) == holders


def test_a_lost_rank_gets_its_shard_from_the_other_half() -> None:
    plan = plan_repair(EIGHT, {3: LossKind.PROCESS}, 8)

    assert set(plan.parts) == {3, 7}
    assert plan.parts[7][0].role is RepairRole.SEND
    assert plan.parts[3][0].role is RepairRole.RECEIVE
    assert (plan.parts[3][0].sources, plan.parts[3][0].targets, plan.parts[3][0].ranks) == ((7,), (3,), (3, 7))


def test_more_than_half_of_the_ranks_can_be_lost_if_each_shard_is_held_once_more() -> None:
    three_copies = {rank: [ReplicaGroup((0, 1, 2, 3, 4, 5), copies=3)] for rank in range(6)}

    plan = plan_repair(three_copies, dict.fromkeys((0, 1, 2, 5), LossKind.PROCESS), 6)

    assert plan.missing == ()
    assert {rank: part.sources for rank, (part,) in plan.parts.items() if part.role is RepairRole.RECEIVE} == {
        0: (4,),
        1: (3,),
        2: (4,),
        5: (3,),
    }
    assert plan.parts[4][0].targets == (0, 2)


def test_failed_memory_is_filled_in_place_and_memory_that_held_nothing_is_left_alone() -> None:
    plan = plan_repair(EIGHT, {0: LossKind.MEMORY, 1: LossKind.NOTHING}, 8)

    assert plan.parts[0][0].role is RepairRole.RECEIVE_IN_PLACE
    assert plan.parts[4][0].role is RepairRole.SEND
    assert (plan.parts[1][0].role, plan.parts[1][0].sources, plan.parts[1][0].targets) == (RepairRole.KEEP, (1,), (1,))
    assert 5 not in plan.parts


def test_all_load_a_checkpoint_if_no_copy_of_a_shard_is_left() -> None:
    plan = plan_repair(EIGHT, {3: LossKind.PROCESS, 7: LossKind.MEMORY}, 8)

    assert plan.missing == (3, 7)
    assert {rank: part.role for rank, (part,) in plan.parts.items()} == dict.fromkeys(range(8), RepairRole.LOAD) | {
        7: RepairRole.LOAD_IN_PLACE
    }


def test_two_optimizers_of_a_rank_come_from_where_each_is_held() -> None:
    both = [ReplicaGroup((0, 1, 2, 3), copies=2), ReplicaGroup((0, 1), copies=2)]

    plan = plan_repair({0: both}, {0: LossKind.PROCESS}, 4)

    assert (plan.parts[0][0].kinds, plan.parts[0][0].sources) == ((0, 1), (2, 1))
    assert {rank: part.kinds for rank, (part,) in plan.parts.items() if part.role is RepairRole.SEND} == {
        2: (0,),
        1: (1,),
    }


def test_ranks_that_declare_nothing_all_hold_the_same() -> None:
    plan = plan_repair({}, {1: LossKind.PROCESS}, 2)

    assert plan.parts[1][0].sources == (0,)


def test_ranks_that_hold_the_whole_state_together_save_it() -> None:
    saves = plan_dump(EIGHT, (0, 1, 2, 3, 4, 5, 7), 8)

    assert saves == {0: [(0, (0, 2))], 2: [(0, (0, 2))], 1: [(0, (1, 3))], 3: [(0, (1, 3))]}


def test_a_shard_of_a_lost_rank_is_saved_by_who_holds_it_too() -> None:
    saves = plan_dump(EIGHT, (0, 1, 4, 5, 6, 7), 8)

    assert saves == {0: [(0, (0, 6))], 6: [(0, (0, 6))], 1: [(0, (1, 7))], 7: [(0, (1, 7))]}


def test_nothing_is_saved_if_no_copy_of_a_shard_is_left() -> None:
    assert plan_dump(EIGHT, (0, 1, 3, 4, 5, 7), 8) == "for a shard of ranks 0, 2, 4, 6 no copy is left"


@pytest.mark.parametrize(
    ("gone", "leaving"),
    [
        ((5,), (4, 5)),  # tensor-parallel neighbours
        ((0, 7), (0, 1, 6, 7)),
        ((), ()),
        ((0, 2, 4, 6), tuple(range(8))),
    ],
)
def test_with_a_rank_its_whole_replica_leaves(gone: tuple[int, ...], leaving: tuple[int, ...]) -> None:
    groups = {rank: [(0, 2, 4, 6) if rank % 2 == 0 else (1, 3, 5, 7)] for rank in range(8)}

    assert who_leaves(groups, gone) == leaving


def test_a_replica_is_as_large_as_the_smallest_data_parallel_group_makes_it() -> None:
    of_experts = {rank: (rank % 2, rank % 2 + 2) for rank in range(4)}  # experts over two ranks, attention in each

    leaving = who_leaves({rank: [(0, 1, 2, 3), of_experts[rank]] for rank in range(4)}, (3,))

    assert leaving == (2, 3)


def test_nothing_comes_from_a_rank_that_is_away() -> None:
    plan = plan_repair(EIGHT, {3: LossKind.PROCESS}, 8, away=(6, 7))

    assert plan.missing == (3,)
    assert set(plan.parts) == {0, 1, 2, 3, 4, 5}
    assert {part.ranks for (part,) in plan.parts.values()} == {(0, 1, 2, 3, 4, 5)}
