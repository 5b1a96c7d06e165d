"""What the agent that leads lets the others know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.agent.nodes import part
from ttprun import recovery
from ttprun.agent.cluster.leader import Leader
from ttprun.protocol import meeting


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
