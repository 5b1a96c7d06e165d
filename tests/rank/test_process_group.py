"""The managed process group itself: its life, as a script sees it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.rank.collectives import FLOAT, SUMS, ours, plain
from tests.rank.worlds import run_world
from ttprun.rank.process_group import ManagedGroup
from ttprun.rank.session import current


def destroy_and_begin_again(rank: int, place: str) -> Any:
    from ttprun.rank import journal

    journal.PATIENCE_S = 0.5
    group = dist.new_group([0, 1])
    x = ours(rank)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    session = current()
    left = None if session is None else len(session.groups)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    y = ours(rank)
    dist.all_reduce(y)
    return plain([x, y, left, isinstance(dist.group.WORLD, ManagedGroup)])


def test_a_script_may_destroy_its_groups_and_begin_again(tmp_path: Any) -> None:
    found = run_world(destroy_and_begin_again, str(tmp_path / "again"), limit_s=8.0)

    assert found == [[[FLOAT, SUMS], [FLOAT, SUMS], 0, True]] * 2
