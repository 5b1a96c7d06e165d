"""How much memory each rank's mirror may take, and that where none is wanted nothing is taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent.base.peers import Peers
from ttprun.agent.lead.comparisons import MirrorShares
from ttprun.agent.node import mirrors
from ttprun.agent.node.mirrors import Mirrors
from ttprun.agent.node.node import Process
from ttprun.protocol.board import Board

FREE = 8000
Make = Callable[..., tuple[Mirrors, Any]]


class Slot(Process):
    """Notes what its process is sent last."""

    def send_if_present(self, put: Any) -> None:
        self.order = put


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`make(key=value)`: of a node with three ranks, when 8,000 bytes are free."""
    monkeypatch.setattr(mirrors, "free_bytes", lambda: FREE)
    made = []

    def new(nodes: int = 1, **config: object) -> tuple[Mirrors, Any]:
        slots = [Slot(rank, rank, None, record_fd=-1) for rank in range(3)]
        wanted = {"buddy": "auto", "buddy_memory": "25%", "mindio": False} | config
        node: Any = SimpleNamespace(
            config=SimpleNamespace(**wanted),
            rungs=frozenset(("replace", "rewind")),
            world_size=3,
            keeps_mirrors_twice=nodes > 1 and config.get("buddy") == "node",
            here=slots,
            slots=slots,
            process=lambda rank: slots[rank],
            board=Board.create(3)[1],
            peers=Peers(ranks_per_node=3, size=nodes),
        )
        node.shares = MirrorShares(node)
        made.append(Mirrors(node))
        return made[-1], node

    yield new
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("config", "together"),
    [
        ({}, 2000),
        ({"buddy_memory": "1000"}, 1000),
        ({"buddy_memory": "1TiB"}, FREE),
        ({"buddy": "on"}, FREE),
        ({"buddy": "node"}, 2000),
        ({"buddy": "node", "nodes": 2}, 1000),
    ],
)
def test_the_ranks_of_a_node_share_its_memory_by_their_weights(
    make: Make, config: dict[str, str], together: int
) -> None:
    found, node = make(**config)

    assert node.shares.share_out({0: 300, 2: 100})

    for slot in (node.slots[0], node.slots[2]):
        keep(found, node, slot)
    assert node.slots[0].order.limit_bytes == together * 3 // 4
    assert node.shares.order_for(1) is None
    assert node.slots[2].order.limit_bytes == together // 4
    assert not node.shares.share_out({0: 300, 2: 100})


def test_the_same_memory_is_kept_when_more_ranks_turn_out_to_be_single_holders(make: Make) -> None:
    found, node = make()
    node.shares.share_out({0: 100})
    keep(found, node, node.slots[0])
    before = found.paths_for(0)

    node.shares.share_out({0: 100, 1: 100})
    keep(found, node, node.slots[0])
    keep(found, node, node.slots[1])

    assert found.paths_for(0) == before
    assert all(os.path.exists(path) for path in found.paths_for(1))


@pytest.mark.parametrize("config", [{"buddy": "off"}, {"mindio": True}])
def test_where_no_mirror_is_wanted_no_rank_gets_one(make: Make, config: dict[str, object]) -> None:
    _, node = make(**config)

    assert not node.shares.share_out({0: 100, 1: 100, 2: 100})
    assert [node.shares.order_for(slot.rank) for slot in node.slots] == [None] * 3


def test_where_all_ranks_hold_the_same_no_file_is_made(make: Make) -> None:
    found, node = make()

    assert not node.shares.share_out({})
    assert [found.paths_for(slot.rank) for slot in node.slots] == [[]] * 3


def test_each_node_shares_out_its_own_memory(make: Make) -> None:
    _, node = make()
    node.peers.ranks_per_node = 2

    node.shares.share_out({0: 100, 1: 300, 2: 100})

    orders = [node.shares.order_for(slot.rank) for slot in node.slots]
    assert [order.share for order in orders if order] == [0.25, 0.75, 1.0]


@pytest.mark.parametrize(("config", "is_limited"), [({}, True), ({"buddy": "on"}, False)])
def test_only_a_mirror_that_nobody_has_asked_for_is_limited_in_what_it_costs(
    make: Make, config: dict[str, str], is_limited: bool
) -> None:
    found, node = make(**config)
    node.shares.share_out({0: 300})

    keep(found, node, node.slots[0])

    assert (node.slots[0].order.limit_share > 0) == is_limited


def keep(found: Mirrors, node: Any, slot: Process) -> None:
    """Its node gets the order."""
    order = node.shares.order_for(slot.rank)
    assert order is not None
    found.keep(order)
