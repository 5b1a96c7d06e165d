"""The slots of a lost node: who gets them, with what, and what happens if nobody comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.lead.membership import Discovery, Placement
from ttprun.agent.lead.rows import Wire
from ttprun.errors import ConfigError
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
    """What `Placement` uses of a node."""

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
def placement(node: FakeNode) -> Placement:
    wire = Wire(node, own=None)  # type: ignore[arg-type]
    membership = SimpleNamespace(may_shrink=lambda: False, may_train=lambda address: node.may_train(address))
    return Placement(node, wire, membership)  # type: ignore[arg-type]


def test_a_rank_of_a_node_that_is_there_is_spawned_there(node: FakeNode, placement: Placement) -> None:
    placement.start(SpawnRank(4, 1))

    assert node.peers.sent == [(2, process_orders.SpawnRank(4, 1))]


def test_ranks_of_a_lost_node_are_spawned_on_the_next_that_comes_once_it_has_their_records(
    node: FakeNode, placement: Placement
) -> None:
    placement.start(SpawnRank(2, 1))
    placement.start(SpawnRank(3, 1))
    before = list(node.peers.sent)
    node.peers.waiting.append("10.0.0.9")
    placement.fill()
    asked = node.peers.sent.copy()
    placement.take_records(node_messages.Records(2, "two"))
    placement.take_records(node_messages.Records(3, "three"))

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
    node: FakeNode, placement: Placement
) -> None:
    quarantined, node.config.node_wait_s = {"10.0.0.2"}, 60.0
    node.may_train = lambda address: address not in quarantined
    node.peers.waiting.append("10.0.0.2")
    placement.start(SpawnRank(2, 1))
    placement.look()
    before = list(node.peers.sent)

    quarantined.clear()
    placement.look()

    assert before == []
    assert node.peers.sent == [(2, node_messages.GiveRecords([2, 3]))]


def test_if_nobody_comes_in_time_no_process_can_be_started(node: FakeNode, placement: Placement) -> None:
    placement.start(SpawnRank(2, 1))

    placement.look()

    assert [type(event) for event in node.events] == [SpawnFailed]
    assert "--node-wait-s" in node.events[0].reason  # type: ignore[attr-defined]


def test_without_a_copy_of_its_records_a_rank_is_not_started_elsewhere(node: FakeNode, placement: Placement) -> None:
    node.peers.waiting.append("10.0.0.9")
    placement.start(SpawnRank(2, 1))

    placement.take_records(node_messages.Records(2, ""))
    placement.take_records(node_messages.Records(3, "three"))

    assert [getattr(event, "rank", None) for event in node.events] == [2]
    assert not any(isinstance(message, process_orders.SpawnRank) for _, message in node.peers.sent)


def test_if_the_node_that_keeps_the_copies_is_lost_too_there_are_none(node: FakeNode, placement: Placement) -> None:
    node.peers.connected.discard(2)
    node.peers.waiting.append("10.0.0.9")

    placement.start(SpawnRank(2, 1))

    assert [type(event) for event in node.events] == [SpawnFailed]


def test_records_for_a_spare_that_is_lost_as_well_are_dropped(node: FakeNode, placement: Placement) -> None:
    node.peers.waiting.append("10.0.0.9")
    placement.start(SpawnRank(2, 1))
    node.peers.sent.clear()

    placement.forget(1)
    placement.take_records(node_messages.Records(2, "two"))

    assert node.peers.sent == []


def test_if_the_node_that_keeps_the_copies_is_lost_before_it_has_answered_nobody_waits_for_it(
    node: FakeNode, placement: Placement
) -> None:
    node.peers.waiting.append("10.0.0.9")
    placement.start(SpawnRank(2, 1))
    placement.start(SpawnRank(3, 1))
    placement.take_records(node_messages.Records(2, "two"))

    node.peers.connected.discard(2)
    placement.lose_copies(2)

    assert [getattr(event, "rank", None) for event in node.events] == [3]
    assert not any(
        isinstance(message, process_orders.SpawnRank) and message.rank == 3 for _, message in node.peers.sent
    )


def test_a23_a_command_that_fails_at_first_is_refused_with_what_it_says() -> None:
    with pytest.raises(ConfigError, match=r"--discovery: 'echo no such list >&2; exit 3' fails: exit code 3 \(no such"):
        Discovery("echo no such list >&2; exit 3", 2).first()


def test_a23_a_command_that_names_no_host_at_first_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "hosts").touch()
    found = Discovery(f"cat {tmp_path}/hosts", 2, every_s=0.01)
    waiting = threading.Thread(target=found.first)
    waiting.start()
    time.sleep(0.1)

    assert waiting.is_alive()
    (tmp_path / "hosts").write_text("127.0.0.1:4\n")
    waiting.join(60)

    assert found.named == {"127.0.0.1": 2}


@pytest.mark.parametrize(("later", "why"), [(None, "exit code 1"), ("\n\n", "it names no host"), ("a:b", "host:slots")])
def test_a23_a_command_that_fails_later_changes_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, later: str | None, why: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1\n")
    found = Discovery(f"cat {hosts}", 2)
    found.first()
    hosts.unlink() if later is None else hosts.write_text(later)

    with caplog.at_level(logging.WARNING, "ttprun"):
        found.poll()
        found.poll()

    assert found.named == {"127.0.0.1": 1}
    assert len(caplog.messages) == 1
    assert why in caplog.messages[0]
    hosts.write_text("127.0.0.1\n127.0.0.2")
    found.poll()
    assert found.named == {"127.0.0.1": 1, "127.0.0.2": 1}
