"""What the agent that leads lets the others know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from tests.agent.nodes import node_of, part
from ttprun import recovery
from ttprun.agent.base.ground import Failure
from ttprun.agent.base.peers import Peers
from ttprun.agent.launcher.group import Group
from ttprun.agent.lead.coordinator import Leader
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.board import SHARED, Field
from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.meeting import Known
from ttprun.protocol.rank_events import Event, RankExited, RankStarted
from ttprun.recovery.replicas import Replicas


class FakePeers:
    """Two nodes; what is sent to the other one is noted."""

    def __init__(self) -> None:
        self.pool = SimpleNamespace(announce=lambda pools: None)
        self.pools = {number: meeting.Where() for number in range(2)}
        self.listeners: dict[int, meeting.Where] = {}
        self.happened: list[Any] = []

    is_follower, reach = False, (3, 3)

    def is_connected(self, node: int) -> bool:
        return True

    def to_all(self, message: Any) -> None:
        self.happened.append(message)


class FakeCoordinator:
    """The machine alone."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def advance(self, event: Event) -> None:
        self.node.job, _ = recovery.advance(self.node.job, event)


def test_all_know_of_a_launcher_that_waits_before_anybody_can_see_it_in_the_event_log() -> None:
    peers = FakePeers()
    job = recovery.new_job(recovery.Settings(world_size=2))
    node = SimpleNamespace(peers=peers, job=job, log=lambda event, **fields: peers.happened.append(event))
    reports = SimpleNamespace(checkpoints=SimpleNamespace(why_never=""))

    part(Leader, node, reports=reports, placement=SimpleNamespace(fill=lambda: None)).welcome("10.0.0.3")

    first, *_, last = peers.happened
    assert isinstance(first, meeting.SparePools)
    assert first.others == 1
    assert last == "node_waits"


def test_who_is_a_replica_is_known_to_all_agents_as_soon_as_the_one_that_leads_knows_it() -> None:
    peers = FakePeers()
    node = SimpleNamespace(peers=peers, job=recovery.new_job(recovery.Settings(world_size=2)))
    reports = SimpleNamespace(checkpoints=SimpleNamespace(why_never=""))
    group: Any = SimpleNamespace(
        _node=node, coordinator=FakeCoordinator(node), leader=part(Leader, node, reports=reports)
    )

    Group._advance(group, recovery.RanksCompared(at_s=1.0, replicas=Replicas(compared_at=4)))

    (known,) = [one for one in peers.happened if isinstance(one, Known)]
    assert known.compared_at == 4


def test_an_exit_is_logged_and_decided_on_in_the_same_way_on_whichever_node_it_was(tmp_path: Path) -> None:
    events: list[Event] = []
    logged: list[dict[str, Any]] = []
    node = node_of(tmp_path, advance=events.append)
    node.job = recovery.new_job(recovery.Settings(world_size=2))
    node.begin_group([(0, 0)], Peers(0, "127.0.0.1", 1, {}, {0: "a", 1: "b"}, 2))
    node.log = lambda event, **fields: logged.append({"event": event, **fields})  # type: ignore[method-assign]
    node.reached = lambda rank, recorded: recorded + 1  # type: ignore[method-assign]
    leader = part(Leader, node)
    leader.report(1, RankStarted(at_s=0.0, rank=1, pid=101))
    node.slots[0].pid, node.slots[0].is_lost = 100, True  # as its watch has seen
    events.clear()
    logged.clear()

    failures = []
    for number in range(2):
        node.first_failure.forget()
        leader.report(
            number,
            RankExited.ended(-9, at_s=0.0, rank=number, pid=100 + number, boundary=7, reason="killed", traceback="its"),
        )
        failures.append(node.first_failure.found)

    own, other = events
    assert isinstance(own, RankExited)
    assert isinstance(other, RankExited)
    assert replace(own, at_s=0.0, rank=1, pid=101) == replace(other, at_s=0.0)
    assert (own.boundary, own.traceback) == (8, "")
    assert failures == [Failure(rank, 100 + rank, -9, "killed", "its") for rank in range(2)]
    assert [(one["event"], one["rank"], one.get("node")) for one in logged] == [
        ("rank_exited", 0, None),
        ("rank_exited", 1, 1),
    ]
    assert node.slots[1].is_lost


def test_a_process_that_has_ended_is_not_heard_any_more_on_whichever_node_it_was(tmp_path: Path) -> None:
    taken: list[tuple[int, Any]] = []
    node = node_of(tmp_path)
    node.begin_group([(0, 0)], Peers(0, "127.0.0.1", 1, {}, {0: "a", 1: "b"}, 2))
    leader = part(Leader, node, reports=SimpleNamespace(take=lambda slot, message: taken.append((slot.rank, message))))
    for slot in node.slots:
        slot.pid = 200 + slot.rank
    message = RankFrozen(1, 4, "w")
    stands = node_messages.Rows(1, [meeting.BoardRow(1, [4] * len(SHARED), "S", 2.5)])

    for pid in (100, 200):
        leader.report(0, node_messages.Said(0, pid, message))
        leader.take(1, node_messages.Said(1, pid + 1, message, fingerprint="f").encoded(2, stands))

    assert taken == [(0, message), (1, message)]
    assert node.slots[1].fingerprints == {4: "f"}
    assert node.slots[1].cpu_s == 2.5
    assert node.board.get(1, Field.RECORDED) == 4


def test_nodes_that_are_lost_at_once_are_one_fault_which_the_survivors_answer_once(tmp_path: Path) -> None:
    events: list[Event] = []
    node = node_of(tmp_path, advance=events.append)
    node.begin_group([(0, 0), (1, 1)], Peers(0, "127.0.0.1", 2, {}, {0: "a", 1: "b", 2: "c", 3: "d"}, 4))
    leader = part(
        Leader,
        node,
        placement=SimpleNamespace(forget=lambda number: None, lose_copies=lambda number: None),
        membership=SimpleNamespace(note_lost=lambda number: None),
        reports=SimpleNamespace(comparisons=SimpleNamespace(lose_mirrors=lambda ranks: None)),
    )

    for number in (3, 1):
        leader.lose(number, "its agent has closed the connection")
    assert events == []
    for _ in range(2):
        leader.decide_lost()

    (lost,) = events
    assert isinstance(lost, recovery.NodeLost)
    assert lost.ranks == (2, 3, 6, 7)
    assert lost.name == "node 1 (b) and node 3 (d)"
