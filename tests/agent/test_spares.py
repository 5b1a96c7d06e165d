"""The slots of a lost node: who gets them, with what, and what happens if nobody comes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.lead.lead import Wire
from ttprun.agent.lead.membership import Spares
from ttprun.protocol import node_messages, process_orders
from ttprun.protocol.process_orders import SpawnRank
from ttprun.protocol.rank_events import Event, SpawnFailed


class FakePeers:
    """Three nodes of two ranks, led by the first one; what is sent is noted.

    connected   nodes whose agents are there
    waiting     addresses of launchers that wait
    """

    node, size, ranks_per_node = 0, 3, 2

    def __init__(self) -> None:
        self.connected = {0, 2}
        self.waiting: list[str] = []
        self.sent: list[tuple[int, Any]] = []

    def node_of(self, rank: int) -> int:
        return rank // 2

    def name_of(self, node: int) -> str:
        return f"node {node}"

    def shown(self, node: int) -> str:
        return f"10.0.0.{node}"

    def is_connected(self, node: int) -> bool:
        return node in self.connected

    def slot(self, node: int, may: Callable[[str], bool]) -> str | None:
        found = next(filter(may, self.waiting), None)
        if found is not None:
            self.connected.add(node)
            self.waiting.remove(found)
        return found

    def send(self, node: int, message: Any) -> None:
        self.sent.append((node, message))


class FakeNode:
    """What `Spares` uses of a node."""

    def __init__(self) -> None:
        self.peers = FakePeers()
        self.config = SimpleNamespace(node_wait_s=0.0)
        self.job = recovery.new_job(recovery.Settings(world_size=6))
        self.events: list[Event] = []
        self.may_train: Callable[[str], bool] = lambda address: True

    def log(self, event: str, **fields: object) -> None: ...

    def advance(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def spares(node: FakeNode) -> Spares:
    wire = Wire(node, own=None)  # type: ignore[arg-type]
    membership = SimpleNamespace(may_shrink=lambda: False, may_train=lambda address: node.may_train(address))
    return Spares(node, wire, membership)  # type: ignore[arg-type]


def test_a_rank_of_a_node_that_is_there_is_spawned_there(node: FakeNode, spares: Spares) -> None:
    spares.spawn(SpawnRank(4, 1))

    assert node.peers.sent == [(2, process_orders.SpawnRank(4, 1))]


def test_ranks_of_a_lost_node_are_spawned_on_the_next_that_comes_once_it_has_their_records(
    node: FakeNode, spares: Spares
) -> None:
    spares.spawn(SpawnRank(2, 1))
    spares.spawn(SpawnRank(3, 1))
    before = list(node.peers.sent)
    node.peers.waiting.append("10.0.0.9")
    spares.fill()
    asked = node.peers.sent.copy()
    spares.take_records(node_messages.Records(2, "two"))
    spares.take_records(node_messages.Records(3, "three"))

    assert before == []
    assert asked == [(2, node_messages.GiveRecords([2, 3]))]
    assert node.peers.sent[1:] == [
        (1, node_messages.Records(2, "two")),
        (1, node_messages.Records(3, "three")),
        (1, process_orders.SpawnRank(2, 1)),
        (1, process_orders.SpawnRank(3, 1)),
    ]
    assert node.events == []


def test_a_node_that_was_lost_a_moment_ago_takes_no_slots_before_its_time_is_over(
    node: FakeNode, spares: Spares
) -> None:
    quarantined, node.config.node_wait_s = {"10.0.0.2"}, 60.0
    node.may_train = lambda address: address not in quarantined
    node.peers.waiting.append("10.0.0.2")
    spares.spawn(SpawnRank(2, 1))
    spares.look()
    before = list(node.peers.sent)

    quarantined.clear()
    spares.look()

    assert before == []
    assert node.peers.sent == [(2, node_messages.GiveRecords([2, 3]))]


def test_if_nobody_comes_in_time_no_process_can_be_started(node: FakeNode, spares: Spares) -> None:
    spares.spawn(SpawnRank(2, 1))

    spares.look()

    assert [type(event) for event in node.events] == [SpawnFailed]
    assert "--node-wait-s" in node.events[0].reason  # type: ignore[attr-defined]


def test_without_a_copy_of_its_records_a_rank_is_not_started_elsewhere(node: FakeNode, spares: Spares) -> None:
    node.peers.waiting.append("10.0.0.9")
    spares.spawn(SpawnRank(2, 1))

    spares.take_records(node_messages.Records(2, ""))
    spares.take_records(node_messages.Records(3, "three"))

    assert [getattr(event, "rank", None) for event in node.events] == [2]
    assert not any(isinstance(message, process_orders.SpawnRank) for _, message in node.peers.sent)


def test_if_the_node_that_keeps_the_copies_is_lost_too_there_are_none(node: FakeNode, spares: Spares) -> None:
    node.peers.connected.discard(2)
    node.peers.waiting.append("10.0.0.9")

    spares.spawn(SpawnRank(2, 1))

    assert [type(event) for event in node.events] == [SpawnFailed]


def test_records_for_a_spare_that_is_lost_as_well_are_dropped(node: FakeNode, spares: Spares) -> None:
    node.peers.waiting.append("10.0.0.9")
    spares.spawn(SpawnRank(2, 1))
    node.peers.sent.clear()

    spares.forget(1)
    spares.take_records(node_messages.Records(2, "two"))

    assert node.peers.sent == []


def test_if_the_node_that_keeps_the_copies_is_lost_before_it_has_answered_nobody_waits_for_it(
    node: FakeNode, spares: Spares
) -> None:
    node.peers.waiting.append("10.0.0.9")
    spares.spawn(SpawnRank(2, 1))
    spares.spawn(SpawnRank(3, 1))
    spares.take_records(node_messages.Records(2, "two"))

    node.peers.connected.discard(2)
    spares.lose_copies(2)

    assert [getattr(event, "rank", None) for event in node.events] == [3]
    assert not any(
        isinstance(message, process_orders.SpawnRank) and message.rank == 3 for _, message in node.peers.sent
    )
