"""A survivor is just making its process group while another rank is lost: each moment of it, forced and not by chance.

Rank 0 survives. `hold_at` stops it in the middle of its connecting, until the scenario says go.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.test_gpus import unprotected
from tests.rank.worlds import FakeAgent, run_world, say, wait_for
from ttprun.groups import connection
from ttprun.introspect.current_rank import current
from ttprun.protocol import from_rank

SUMS = [30.0, 32.0, 34.0]
WHILE_IT_WAITS = "while it waits for the other's port"
MOMENTS = (
    "before it has reported its port",
    WHILE_IT_WAITS,
    "when it knows the other's port",
    "before it has reported its address",
)
# At these moments the other rank has come as far as to report its port, and is lost after that.
OTHER_IS_THERE = ("when it knows the other's port", "before it has reported its address")


def ours(rank: int) -> torch.Tensor:
    return torch.arange(3, dtype=torch.float32) + 10 * (rank + 1)


def summed(rank: int, group: Any = None) -> list[float]:
    x = ours(rank)
    dist.all_reduce(x, group=group)
    found: list[float] = x.tolist()
    return found


def begin(rank: int, size: int = 2) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=size)


def is_first_life() -> bool:
    """Whether this process is no replacement."""
    session = current()
    assert session is not None
    return session.generation == 1


def hold_at(moment: str) -> None:
    """In rank 0: stop once at this moment of connecting, say so, and go on when the scenario says go.

    While it waits for the other's port it need not be stopped: there it stands by itself.
    """
    exchange: Any = connection.Exchange
    put, get = exchange.put, exchange.get
    left = [moment]

    def come_to(here: str) -> None:
        if left == [here]:
            left.clear()
            say(f"held {here}")
            if here != WHILE_IT_WAITS:
                wait_for(f"go {here}")

    def held_put(self: Any, generation: int, key: str, value: bytes) -> None:
        come_to("before it has reported its port" if "/port 0" in key else "before it has reported its address")
        put(self, generation, key, value)

    def held_get(self: Any, generation: int, key: str, limit_s: float) -> bytes:
        is_port = "/port 1" in key
        if is_port:
            come_to(WHILE_IT_WAITS)
        value: bytes = get(self, generation, key, limit_s)
        if is_port:
            come_to("when it knows the other's port")
        return value

    exchange.put, exchange.get = held_put, held_get


def be_lost_before(moment: str) -> None:
    """In rank 1: be gone, before or after telling its port, as `moment` of rank 0 demands."""
    if moment not in OTHER_IS_THERE:
        be_lost()
    exchange: Any = connection.Exchange
    exchange.get = lambda *_: be_lost()


def be_lost() -> None:
    say("lost")
    signal.pause()


def make_world(rank: int, moment: str) -> list[Any]:
    """The default group."""
    if rank == 0:
        hold_at(moment)
    elif is_first_life():
        be_lost_before(moment)
    begin(rank)
    return [summed(rank), unprotected()]


def make_another(rank: int, moment: str) -> list[Any]:
    """A further group, behind an operation in the default group, which the journal holds."""
    begin(rank)
    before = summed(rank)
    if rank == 0:
        hold_at(moment)
    elif is_first_life():
        be_lost_before(moment)
    group = dist.new_group([0, 1])
    return [before, summed(rank, group), summed(rank), unprotected()]


def replace_with(agent: FakeAgent, rank: int, survivor: int = 0) -> None:
    """Put a replacement in a lost rank's place: it is to issue what a survivor has issued."""
    agent.kill(rank)
    frozen = agent.freeze(lost=[rank])[survivor]
    agent.replace(rank)
    agent.resume({name: group.issued for name, group in frozen.journal.items()})


def lose_and_go_on_at_once(agent: FakeAgent, moment: str) -> None:
    agent.wait_for(0, from_rank.Note, text=f"held {moment}")
    agent.wait_for(1, from_rank.Note, text="lost")
    agent.send_value(0, f"go {moment}")
    replace_with(agent, 1)


def lose_and_go_on_late(agent: FakeAgent, moment: str) -> None:
    """Rank 0 has been ordered to resume before it notices anything."""
    agent.wait_for(0, from_rank.Note, text=f"held {moment}")
    agent.wait_for(1, from_rank.Note, text="lost")
    replace_with(agent, 1)
    agent.wait_for(1, from_rank.RankRebuilt, generation=agent.generation)
    agent.send_value(0, f"go {moment}")


HOW = pytest.mark.parametrize("lose", [lose_and_go_on_at_once, lose_and_go_on_late], ids=["at once", "late"])


@HOW
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_makes_its_world_while_another_is_lost_makes_it_with_the_replacement(
    lose: Any, moment: str
) -> None:
    found = run_world(make_world, moment, scenario=functools.partial(lose, moment=moment), is_begun=False)

    assert found == [[SUMS, ""]] * 2


@HOW
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_makes_another_group_while_one_is_lost_makes_it_with_the_replacement(
    lose: Any, moment: str
) -> None:
    found = run_world(make_another, moment, scenario=functools.partial(lose, moment=moment), is_begun=False)

    assert found == [[SUMS, SUMS, SUMS, ""]] * 2


def use_two_groups(rank: int) -> list[Any]:
    """Rank 1 is lost behind operations in two groups; its replacement makes the second between operations."""
    begin(rank)
    found = [summed(rank)]
    group = dist.new_group([0, 1])
    found += [summed(rank, group), summed(rank)]
    if rank == 0:
        say("waiting")
    elif is_first_life():
        be_lost()
    return [*found, summed(rank, group), unprotected()]


def lose_behind_two_groups(agent: FakeAgent) -> None:
    agent.wait_for(0, from_rank.Note, text="waiting")
    agent.wait_for(1, from_rank.Note, text="lost")
    replace_with(agent, 1)


def test_a_replacement_that_runs_from_the_top_meets_the_survivors_in_both_groups() -> None:
    """It makes the second group only after it was helped through the first, so nobody may wait for it there before."""
    found = run_world(use_two_groups, scenario=lose_behind_two_groups, is_begun=False)

    assert found == [[SUMS, SUMS, SUMS, SUMS, ""]] * 2


def be_ahead(rank: int) -> list[Any]:
    """Rank 0 is through a gather and makes a group; rank 1 still waits in the gather for rank 2, which is lost."""
    begin(rank, size=3)
    if rank == 2 and is_first_life():
        be_lost()
    parts = [torch.zeros(3) for _ in range(3)] if rank == 1 else None
    dist.gather(ours(rank), parts, dst=1)
    if rank == 0:
        hold_at(WHILE_IT_WAITS)
    group = dist.new_group([0, 1, 2])
    return [[part[0].item() for part in parts or ()], summed(rank, group), unprotected()]


def lose_the_one_behind(agent: FakeAgent) -> None:
    agent.wait_for(0, from_rank.Note, text=f"held {WHILE_IT_WAITS}")
    agent.wait_for(2, from_rank.Note, text="lost")
    replace_with(agent, 2)


def test_a_rank_that_makes_a_group_helps_one_that_is_not_there_yet() -> None:
    """Rank 0 must serve the gather again before it waits for anybody in the new group."""
    found = run_world(be_ahead, scenario=lose_the_one_behind, size=3, is_begun=False)

    sums = [60.0, 63.0, 66.0]
    assert found == [[[], sums, ""], [[10.0, 20.0, 30.0], sums, ""], [[], sums, ""]]
