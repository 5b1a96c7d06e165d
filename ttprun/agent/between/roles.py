"""The two roles of an agent: it decides for all nodes, or carries out what another one decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttprun import recovery
from ttprun.agent.between import follower
from ttprun.agent.between.follower import Follower
from ttprun.agent.between.role import Role
from ttprun.agent.between.succession import Succession
from ttprun.agent.lead.conduct import Coordinator
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.leader import Leader
from ttprun.agent.lead.repairs import Repairs
from ttprun.agent.lead.reports import Reports
from ttprun.agent.lead.schedules import QuiesceSchedule
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.agent.lead.wire import Wire
from ttprun.agent.lead.writer import CheckpointWriter
from ttprun.agent.node.node import Node
from ttprun.agent.node.standbys import StandbyWatch
from ttprun.agent.node.unhooked_ranks import UnhookedRanks
from ttprun.chaos.faults import Fault
from ttprun.protocol import node_messages
from ttprun.protocol.rank_events import Event


@dataclass
class Leading(Role):
    """The coordinator is in this agent."""

    node: Node
    wire: Wire
    coordinator: Coordinator
    leader: Leader
    reports: Reports
    checkpoint_writer: CheckpointWriter
    hang_detector: HangDetector
    repairs: Repairs
    snapshots: Snapshots
    standby_watch: StandbyWatch
    quiesce_schedule: QuiesceSchedule
    unseen: UnhookedRanks

    def advance(self, event: Event) -> None:
        self.coordinator.advance(event)
        if isinstance(event, recovery.RanksCompared):  # an agent that leads next needs it for what it saves
            self.leader.share()

    def report(self, report: node_messages.Report) -> None:
        self.wire.report(report)

    def take(self, number: int, message: Any) -> None:
        self.leader.take(number, message)

    def lose(self, number: int, why: str) -> None:
        if not self.node.is_paused:
            self.leader.lose(number, why)

    def welcome(self, address: str) -> None:
        self.leader.welcome(address)

    def end_turn(self) -> None:
        self.wire.drain()
        if not self.node.is_paused:
            self.leader.decide_lost()
        self.reports.pass_on()
        follower.send_shared(self.node)

    def look(self) -> None:
        self.leader.look()
        self.repairs.look()
        self.hang_detector.look()
        look = self.node.domains.look
        look("search for ranks without hooks", self.unseen.look)
        look("standbys", self.standby_watch.look)
        look("snapshots", self.snapshots.look)
        look("checkpoints in the background", self.checkpoint_writer.look)
        look("times for checkpoints", self.quiesce_schedule.look)

    def inject(self, fault: Fault) -> str:
        return self.reports.injections.order(fault, "inject-fault")


@dataclass
class Following(Role):
    """Another agent decides: it hears what happens here."""

    node: Node
    follower: Follower
    succession: Succession
    standby_watch: StandbyWatch
    unseen: UnhookedRanks

    @property
    def asked_elsewhere(self) -> str:  # type: ignore[override]
        return self.node.peers.leaders_name

    def report(self, report: node_messages.Report) -> None:
        self.follower.report(report)

    def advance(self, event: Event) -> None:
        self.node.log("not_decided", what=type(event).__name__)

    def take(self, number: int, message: Any) -> None:
        self.follower.take_order(message)

    def lose(self, number: int, why: str) -> None:
        if not self.node.is_paused:
            self.succession.begin(number, why)

    def welcome(self, address: str) -> None:
        raise AssertionError("launchers wait at the agent that leads")

    def end_turn(self) -> None:
        follower.send_shared(self.node)

    def look(self) -> None:
        peers = self.node.peers
        if self.follower.look():
            for silent in peers.silent(self.node.has_stepped()):
                self.lose(silent, f"nothing was heard of it for {peers.unheard_s(silent):.0f} s")
        self.succession.look()
        self.node.domains.look("search for ranks without hooks", self.unseen.look)
        self.node.domains.look("standbys", self.standby_watch.look)

    def inject(self, fault: Fault) -> str:
        self.report(node_messages.FaultAsked(str(fault)))
        return f"ordered from {self.node.peers.leaders_name}, whose event log says what has come of it"
