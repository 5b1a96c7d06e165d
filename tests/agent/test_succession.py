"""The agent that leads is lost: whether the next one may lead. Real sockets, no ranks."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent.base.loop import Calls
from ttprun.agent.base.peers import Peers
from ttprun.agent.base.spare_pool import Listener, SparePool
from ttprun.agent.between import rendezvous, succession
from ttprun.agent.between.succession import Succession
from ttprun.protocol import meeting

LIMIT_S = 30.0


class Follower:
    """The second of two nodes, whose agent has just lost the first one, which leads."""

    def __init__(self) -> None:
        self.leads_at = Listener("127.0.0.1", rendezvous.KNOWN)
        pool = SparePool(Listener("127.0.0.1", rendezvous.KNOWN), {})
        self.peers = Peers(1, "127.0.0.1", 1, {}, {0: "127.0.0.1", 1: "127.0.0.1"}, 2, pool, "", leader=0)
        listeners = {0: self.leads_at, 1: pool.listener}
        self.peers.note_pools(meeting.SparePools({number: one.where for number, one in listeners.items()}, 0))
        self.selector = selectors.DefaultSelector()
        self.became: list[str] = []
        node: Any = SimpleNamespace(verdict=None, peers=self.peers, selector=self.selector, here=[], ended_by=0)
        node.log, node.in_background = lambda *_, **__: None, Calls(self.selector).in_background
        follower: Any = SimpleNamespace(give_up=lambda reason: self.became.append(reason))
        nothing: Any = None
        orders: Any = SimpleNamespace(catching_up=set(), parked={})
        self.succession = Succession(node, orders, follower, nothing, nothing, lambda: None)
        self.succession._lead = lambda: self.became.append("leader")  # type: ignore[method-assign]

    def wait(self, until_s: float = LIMIT_S) -> list[str]:
        """What this agent becomes."""
        ends_s = time.monotonic() + until_s
        while not self.became and time.monotonic() < ends_s:
            for key, _ in self.selector.select(0.05):
                key.data()
            self.succession.look()
        return self.became


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    monkeypatch.setattr(succession, "_GATHER_S", 0.8)
    found = Follower()
    yield found
    found.leads_at.close()
    found.peers.close(found.selector)
    found.selector.close()


def test_an_agent_leads_if_the_process_of_the_one_that_led_has_ended(follower: Follower) -> None:
    follower.leads_at.close()

    follower.succession.begin(0, "its agent has closed the connection")

    assert follower.wait() == ["leader"]


@pytest.mark.parametrize(
    ("dying_s", "after_s", "became"),
    [(None, 0.1, "leader"), (0.1, 0.4, "node 1 (127.0.0.1) reaches 1 of 2 agents: the others may go on without it")],
    ids=["a little later", "long after: it has gone on without this node"],
)
def test_an_agent_leads_if_the_process_of_the_one_that_led_closes_its_listener_a_little_later(
    follower: Follower, monkeypatch: pytest.MonkeyPatch, dying_s: float | None, after_s: float, became: str
) -> None:
    if dying_s is not None:
        monkeypatch.setattr(succession, "_DYING_S", dying_s)
    follower.succession.begin(0, "[Errno 104] Connection reset by peer")
    before = list(follower.wait(after_s))
    follower.leads_at.close()

    assert before == []
    assert follower.wait() == [became]
