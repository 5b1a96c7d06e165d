"""The managed process group itself: its life, as a script sees it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.rank.collectives import FLOAT, SUMS, ours, plain
from tests.rank.worlds import run_world
from ttprun.groups.process_group import ManagedGroup
from ttprun.introspect.current_rank import current


def destroy_and_begin_again(rank: int, place: str) -> Any:
    from ttprun.groups import journal

    journal.PATIENCE_S = 0.5
    group = dist.new_group([0, 1])
    x = ours(rank)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    session = current()
    left = None if session is None else len(session.made.living)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    y = ours(rank)
    dist.all_reduce(y)
    return plain([x, y, left, isinstance(dist.group.WORLD, ManagedGroup)])


def other_pairs(rank: int, place: str) -> Any:
    """Rank 0 has been in a group of the name before, rank 2 has not."""
    found = []
    for number, pair in enumerate(([0, 1], [0, 2])):
        if number:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=3)
        group = dist.new_group(pair)
        x = ours(rank)
        if rank in pair:
            dist.all_reduce(x, group=group)
        found.append(x)
    return plain(found)


def test_groups_that_are_made_after_others_were_destroyed_may_have_other_members(tmp_path: Any) -> None:
    found = run_world(other_pairs, str(tmp_path / "again"), size=3)

    of_01, of_02 = [FLOAT, [30.0, 32.0, 34.0]], [FLOAT, [40.0, 42.0, 44.0]]
    assert [found[0][0], found[1][0]] == [of_01, of_01]
    assert [found[0][1], found[2][1]] == [of_02, of_02]


def test_a_script_may_destroy_its_groups_and_begin_again(tmp_path: Any) -> None:
    found = run_world(destroy_and_begin_again, str(tmp_path / "again"))

    assert found == [[[FLOAT, SUMS], [FLOAT, SUMS], 0, True]] * 2
