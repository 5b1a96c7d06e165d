"""Which node a rank is on changes no decision: the same reports from one, two or three nodes lead to the same orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.agent.encoded import EncodedWire
from tests.agent.test_supervisor import make  # noqa: F401 - a fixture
from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.launcher.group import Group, NewGroup
from ttprun.agent.launcher.supervisor import Supervisor
from ttprun.protocol import from_rank, node_messages
from ttprun.protocol.rank_events import RankExited, RankStarted

RANKS = 6


class Noted(Peers):
    """All nodes are there; notes what is ordered on the others."""

    def __init__(self, nodes: int, orders: list[Any]) -> None:
        names = {number: f"10.0.0.{number}" for number in range(nodes)} if nodes > 1 else {}
        super().__init__(0, "10.0.0.0" if nodes > 1 else "", RANKS // nodes, {}, names, nodes)
        self.orders = orders

    def is_connected(self, node: int) -> bool:
        return True

    def send(self, node: int, message: Any) -> None:
        self.orders.append(message)

    def forward(self, rank: int, pid: int, line: str) -> None:
        self.orders.append((rank, pid, node_messages.Forward([(rank, pid)], line).message(RANKS)))


class Own:
    """Notes what is ordered on the leader's own node."""

    def __init__(self, orders: list[Any]) -> None:
        self._orders = orders

    def carry_out(self, order: Any) -> None:
        self._orders.append(order)

    def forward(self, rank: int, pid: int, message: Any) -> None:
        self._orders.append((rank, pid, message))


class Job:
    """Six ranks on so many nodes, of which the first one leads."""

    def __init__(self, supervisor: Supervisor, nodes: int) -> None:
        self.orders: list[Any] = []
        self.node = supervisor.node
        self.node.job = recovery.with_size(self.node.job, RANKS)
        first = range(RANKS // nodes)
        supervisor._begin_group(NewGroup([(rank, rank) for rank in first], lambda *_: None), Noted(nodes, self.orders))
        self.group: Group = supervisor.group
        self.wire: Any = self.group.wire
        self.wire._own = EncodedWire(self.node, Own(self.orders))._own

    def report(self, rank: int, report: Any) -> None:
        """The node of a rank reports."""
        number = self.node.peers.node_of(rank)
        if number == 0:
            self.wire.report(report)
        else:
            self.group.leader.report(number, report)

    def say(self, rank: int, message: Any) -> None:
        fingerprint = "the same" if isinstance(message, from_rank.RankFrozen) else ""
        self.report(rank, node_messages.Said(rank, self.node.slots[rank].pid, message, fingerprint))

    def start(self, rank: int, pid: int) -> None:
        self.report(rank, RankStarted(at_s=0.0, rank=rank, pid=pid))
        self.say(rank, from_rank.Present(pid, 1))
        self.say(rank, from_rank.RankProtected())

    def lose_and_repair(self, lost: int) -> list[str]:
        """A rank is killed and replaced; returns what was ordered, in its order."""
        others = [rank for rank in range(RANKS) if rank != lost]
        for rank in range(RANKS):
            self.start(rank, 100 + rank)
        for rank in range(RANKS):
            self.say(rank, from_rank.Held(1, True, {"w": ("a", "b")}, {}, {}, [], ""))
        self.report(lost, RankExited.ended(-9, at_s=0.0, rank=lost, pid=100 + lost, boundary=7))
        generation = self.node.job.generation
        for rank in others:
            self.say(rank, from_rank.RankFrozen(generation, 7, "d", True))
        self.start(lost, 200)
        self.say(lost, from_rank.RankReplayed(generation, 7, 0.5))
        source = self.node.job.source
        assert source is not None
        self.say(source.rank, from_rank.StateSent(generation, "d"))
        self.say(lost, from_rank.RankRepaired(generation, "d"))
        for rank in range(RANKS):
            self.say(rank, from_rank.RankRebuilt(generation))
        for rank in range(RANKS):
            self.say(rank, from_rank.RankReissued(generation))
        return [*map(str, self.orders)]


@pytest.fixture
def repaired(make: Callable[..., Supervisor]) -> Callable[[int, int], tuple[list[str], str]]:  # noqa: F811
    """`repaired(nodes, lost)`: the orders, and how the job stands afterwards."""
    supervisor = make()

    def repair(nodes: int, lost: int) -> tuple[list[str], str]:
        def work() -> tuple[list[str], str]:
            supervisor.node.job = recovery.new_job(supervisor.node.job.settings)
            return Job(supervisor, nodes).lose_and_repair(lost), str(supervisor.node.job.phase)

        return supervisor._on_thread(work)

    return repair


@pytest.mark.parametrize("lost", range(RANKS))
def test_the_orders_of_a_recovery_are_the_same_on_however_many_nodes_the_ranks_are(
    repaired: Callable[[int, int], tuple[list[str], str]], lost: int
) -> None:
    on_one, phase = repaired(1, lost)

    assert phase == str(recovery.JobPhase.RUNNING)
    assert any(order.startswith("SpawnRank(") for order in on_one)
    for nodes in (2, 3):
        assert repaired(nodes, lost) == (on_one, phase)
