"""When another node counts as lost for its silence."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import cycle, repeat

import pytest

from ttprun.agent.cluster.peers import SILENT_LIMIT_S, Peers
from ttprun.protocol import patience
from ttprun.protocol.channel import Channel


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(patience, "crowd", lambda: 1.0)

    def silent_after(self, peers: Peers, seconds: float, steps: Iterator[bool] = repeat(False)) -> list[int]:  # noqa: B008
        for _ in range(int(4 * seconds)):
            self.now_s += 0.25
            found = peers.silent(next(steps))
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def peers() -> Iterator[Peers]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Peers(0, "10.0.0.1", 1, {1: Channel(ours)}, {0: "here", 1: "there"}, 2)


def test_a_node_whose_agent_says_nothing_while_the_job_stands_is_lost(clock: Clock, peers: Peers) -> None:
    assert clock.silent_after(peers, SILENT_LIMIT_S - 1) == []
    assert clock.silent_after(peers, 2) == [1]


def test_a_node_whose_agent_says_nothing_while_the_job_takes_steps_is_not_lost(clock: Clock, peers: Peers) -> None:
    steps = cycle([True, *[False] * 20])

    assert clock.silent_after(peers, 10 * SILENT_LIMIT_S, steps) == []
