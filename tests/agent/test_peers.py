"""When another node counts as lost for its silence, and in how many messages orders cross to it."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterator
from itertools import cycle, repeat

import pytest

from ttprun.agent.base.peers import SILENT_LIMIT_S, Peers, unpacked
from ttprun.protocol import meeting, node_messages, patience, to_rank
from ttprun.protocol.board import SHARED
from ttprun.protocol.channel import KNOWN, Channel
from ttprun.protocol.codec import Refused, decode, encode


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


def test_of_a_hundred_nodes_one_look_asks_once_how_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(patience, "crowd", lambda: asked.append(None) or 1.0)
    ours, theirs = socket.socketpair()

    with ours, theirs:
        Peers(0, "10.0.0.1", 1, dict.fromkeys(range(1, 101), Channel(ours)), {}, 101).silent(has_stepped=False)

    assert len(asked) == 1


def test_the_same_order_to_all_ranks_of_a_node_crosses_once_and_before_what_is_sent_after_it() -> None:
    ours, theirs = socket.socketpair()
    link = Channel(ours)
    link.waits = False
    peers = Peers(0, "10.0.0.1", 2, {1: link}, {0: "10.0.0.1", 1: "10.0.0.2"}, 2)
    order = to_rank.GoOn(4)

    for rank in (2, 3):
        peers.forward(rank, 100 + rank, peers.line_of(order))
    peers.send(1, node_messages.VoidBeyond(4))

    known = {"Forward": node_messages.Forward, "VoidBeyond": node_messages.VoidBeyond}
    with theirs, ours:
        first, second = Channel(theirs, known).read_available()
    assert first.to == [(2, 102), (3, 103)]
    assert decode(first.line.encode(), KNOWN) == order
    assert second == node_messages.VoidBeyond(4)


def test_what_is_sent_to_one_rank_waits_for_the_end_of_the_turn_only() -> None:
    ours, theirs = socket.socketpair()
    link = Channel(ours)
    link.waits = False
    peers = Peers(0, "10.0.0.1", 2, {1: link}, {0: "10.0.0.1", 1: "10.0.0.2"}, 2)

    peers.forward(2, 102, peers.line_of(to_rank.GoOn(4)))
    peers.flush()

    with theirs, ours:
        (sent,) = Channel(theirs, {"Forward": node_messages.Forward}).read_available()
    assert sent.to == [(2, 102)]


def test_a_long_message_to_all_nodes_crosses_packed_and_is_taken_as_it_was() -> None:
    ours, theirs = socket.socketpair()
    link = Channel(ours)
    link.waits = False
    leader = Peers(0, "10.0.0.1", 2, {1: link}, {0: "10.0.0.1", 1: "10.0.0.2"}, 2)
    rows = node_messages.Rows(1, [meeting.BoardRow(rank, [0] * len(SHARED)) for rank in range(1000)])
    other = Channel(theirs, {"Packed": meeting.Packed, "Rows": node_messages.Rows})

    leader.to_all(rows)

    with theirs, ours:
        (sent,) = other.read_available()
    assert len(sent.line) < len(encode(rows)) / 10
    assert unpacked(sent, other) == rows


@pytest.mark.parametrize("line", [b"", b"no zlib", zlib.compress(b"no JSON"), zlib.compress(b"a" * 100)[:-4]])
def test_a_packed_message_that_cannot_be_read_is_refused(line: bytes) -> None:
    ours, theirs = socket.socketpair()

    with theirs, ours:
        found = unpacked(meeting.Packed(line), Channel(ours))

    assert isinstance(found, Refused)


def test_nothing_is_packed_twice() -> None:
    ours, theirs = socket.socketpair()
    inner = encode(meeting.Packed(b""))

    with theirs, ours:
        found = unpacked(meeting.Packed(zlib.compress(inner)), Channel(ours, {"Packed": meeting.Packed}))

    assert isinstance(found, Refused)
