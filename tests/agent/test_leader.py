"""What the agent that leads lets the others know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.agent.nodes import part
from ttprun import recovery
from ttprun.agent.cluster.leader import Leader
from ttprun.agent.cluster.roles import Leading
from ttprun.protocol import meeting, node_orders
from ttprun.recovery.replicas import Replicas


class FakePool(list[str]):
    """Launchers that wait."""

    def announce(self, pools: meeting.SparePools) -> None: ...


class FakePeers:
    """Two nodes; what is sent to the other one is noted."""

    def __init__(self) -> None:
        self.pool = FakePool(["10.0.0.3"])
        self.pools = {number: meeting.Where() for number in range(2)}
        self.listeners: dict[int, meeting.Where] = {}
        self.happened: list[Any] = []

    def is_connected(self, node: int) -> bool:
        return True

    def to_all(self, message: Any) -> None:
        self.happened.append(message)


class FakeCoordinator:
    """The machine alone."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def advance(self, event: recovery.Event) -> None:
        self.node.job, _ = recovery.advance(self.node.job, event)


def test_all_know_of_a_launcher_that_waits_before_anybody_can_see_it_in_the_event_log() -> None:
    peers = FakePeers()
    job = recovery.new_job(recovery.Settings(world_size=2))
    node = SimpleNamespace(peers=peers, job=job, log=lambda event, **fields: peers.happened.append(event))
    reports = SimpleNamespace(checkpoints=SimpleNamespace(why_never=""))

    part(Leader, node, reports=reports, spares=SimpleNamespace(fill=lambda: None)).welcome("10.0.0.3")

    first, *_, last = peers.happened
    assert isinstance(first, meeting.SparePools)
    assert first.waiting == 1
    assert last == "node_waits"


def test_who_is_a_replica_is_known_to_all_agents_as_soon_as_the_one_that_leads_knows_it() -> None:
    peers = FakePeers()
    node = SimpleNamespace(peers=peers, job=recovery.new_job(recovery.Settings(world_size=2)))
    reports = SimpleNamespace(checkpoints=SimpleNamespace(why_never=""))
    role = part(Leading, node, coordinator=FakeCoordinator(node), leader=part(Leader, node, reports=reports))

    role.advance(recovery.RanksCompared(at_s=1.0, replicas=Replicas(compared_at=4)))

    (known,) = [one for one in peers.happened if isinstance(one, node_orders.Known)]
    assert known.compared_at == 4
