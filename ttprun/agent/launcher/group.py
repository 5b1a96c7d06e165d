"""The parts of the agent: those of the whole run, and those that are made and dropped with a group of ranks.

Which agent decides is asked here and nowhere else: this one, or the one that it follows. Begin with `Group.report`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ttprun import recovery
from ttprun.agent.base.ground import FaultInjection
from ttprun.agent.between.agent import Agent, Follower
from ttprun.agent.between.succession import Succession
from ttprun.agent.launcher.control_socket import Requests
from ttprun.agent.launcher.status_publisher import OfGroup, StatusPublisher
from ttprun.agent.lead.checkpoints import Checkpoints, SnapshotBuffer
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.coordinator import Coordinator, Deadlines, Leader
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.incidents import Incidents, Protection
from ttprun.agent.lead.membership import Elasticity, NodeMembership, Placement
from ttprun.agent.lead.repairs import Repairs, Replays, Rewinds
from ttprun.agent.lead.reports import Reports
from ttprun.agent.lead.resume import Resumption
from ttprun.agent.lead.rows import Wire
from ttprun.agent.lead.schedules import QuiesceSchedule, SnapshotTimes
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.agent.lead.writer import CheckpointWriter
from ttprun.agent.node.mirrors import Mirrors
from ttprun.agent.node.node_agent import NodeAgent, NodeEyes, ReplaceHandler
from ttprun.agent.node.process_watch import ProcessWatch, UnhookedRanks
from ttprun.agent.node.standbys import Standbys, StandbyWatch
from ttprun.agent.node.state_copies import Memory
from ttprun.agent.node.step_again import Again
from ttprun.protocol import node_messages
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reason import Reason
from ttprun.state.store import CheckpointStore


@dataclass(frozen=True)
class NewGroup:
    """Ranks that torch's agent is about to start.

    ranks            (global rank, local rank) of each that is on this node
    replace_handler  called with a local rank and its new process
    on_lead          called by the supervisor's thread when this agent, which was a follower, has begun to lead
    attempt          number of the group's, as torch counts restarts
    restarts_left    how often torch may still restart all ranks
    """

    ranks: list[tuple[int, int]]
    replace_handler: ReplaceHandler
    on_lead: Callable[[], None] = lambda: None
    attempt: int = 0
    restarts_left: int = 0


class Run:
    """What outlives the groups of ranks of one launcher.

    announced   why ranks cannot be repaired, as far as the console was told
    """

    def __init__(self, node: Agent, store: CheckpointStore, resumption: Resumption, elasticity: Elasticity) -> None:
        rungs = node.job.settings.rungs
        is_replaced = "replace" in rungs or (node.config.mindio and "resize" in rungs)
        self.node = node
        self.resumption = resumption
        self.elasticity = elasticity
        self.standbys = Standbys(
            node.config.standbys if is_replaced else 0,
            str(node.run.path),
            node.config.follow,
            contexts=node.config.standby_context,
        )
        self.standby_watch = StandbyWatch(node, self.standbys)
        self.quiesce_schedule = QuiesceSchedule(node)
        self.injections = FaultInjection()
        if node.config.allow_faults:
            from ttprun.chaos.injections import Injections  # a companion, which may be missing otherwise

            self.injections = Injections(node, self.standbys)
        self.incidents = Incidents(node)
        self.times = SnapshotTimes(node)
        self.checkpoint_writer = CheckpointWriter(node, store, resumption)
        self.unseen = UnhookedRanks(node)
        self.status = StatusPublisher(node, self.incidents, self.standbys, self.checkpoint_writer)
        self.requests = Requests(node, self.checkpoint_writer, self.quiesce_schedule, self.standbys)
        self.status.on_straggler = self.requests.move_straggler
        self.announced: set[Reason] = set()
        node.domains.cleaners["standbys"] = self.standby_watch.begin_anew


class Group:
    """The parts of the agent for one group of ranks, made from the bottom up; the node has begun with the group.

    First what this node does for its ranks, then what is decided for all if its agent leads.
    """

    def __init__(self, run: Run, new: NewGroup) -> None:
        node, times, incidents = run.node, run.times, run.incidents
        self._run = run
        self._node = node
        self._restarts_left = new.restarts_left
        run.standbys.begin_preloads(node.loops)
        times.begin_anew()
        self.memory = Memory(node)
        self.mirrors = Mirrors(node)
        self.watch = ProcessWatch(
            *(node, self.memory, self.mirrors, run.injections, run.unseen, run.standby_watch),
        )
        begun_with = node.stored_of if "rewind" in node.rungs else self.memory.kept_of
        self.again = Again(node, self.watch, run.standbys, begun_with)
        self.orders = NodeAgent(
            node,
            injections=run.injections,
            mirrors=self.mirrors,
            memory=self.memory,
            standbys=run.standbys,
            standby_watch=run.standby_watch,
            watch=self.watch,
            again=self.again,
            replace_handler=new.replace_handler,
            tell=self.report,
            stored_of=node.stored_of,
        )
        eyes = NodeEyes(node, self.memory)
        self.wire = wire = Wire(node, self.orders)
        self.comparisons = Comparisons(node, wire, times, incidents)
        self.checkpoints = Checkpoints(node, wire, run.checkpoint_writer, self.comparisons)
        buffers = [SnapshotBuffer(*place) for place in self.memory.snapshots]
        self.snapshots = Snapshots(node, times, self.comparisons, self.checkpoints, buffers, self.again.note_suspect)
        self.repairs: Repairs
        if node.config.mindio:
            from ttprun.mindio.agent_side import Frameworks  # a companion, which may be missing otherwise

            self.repairs = Frameworks(node)
        else:
            self.repairs = Replays(node, wire, self.comparisons, self.checkpoints)
        self.hang_detector = HangDetector(node, self.repairs)
        self.deadlines = Deadlines(node, self.hang_detector)
        self.reports = reports = Reports(
            node,
            wire,
            comparisons=self.comparisons,
            checkpoints=self.checkpoints,
            incidents=incidents,
            injections=run.injections,
            hang_detector=self.hang_detector,
            protection=Protection(node, run.announced),
            repairs=self.repairs,
            snapshots=self.snapshots,
        )
        self.membership = NodeMembership(node, run.resumption, run.quiesce_schedule, run.elasticity, new.attempt)
        self.placement = Placement(node, wire, self.membership)
        self.leader = Leader(node, reports, self.placement, self.membership, run.quiesce_schedule)
        self.coordinator = Coordinator(
            node,
            wire,
            membership=self.membership,
            placement=self.placement,
            checkpoints=self.checkpoints,
            incidents=incidents,
            repairs=self.repairs,
            rewinds=Rewinds(node, wire, run.resumption, self.comparisons, self.snapshots, self.checkpoints),
            hang_detector=self.hang_detector,
            deadlines=self.deadlines,
            leader=self.leader,
        )
        self.follower = Follower(node, self.orders, run.status.take)
        self.succession = Succession(
            node, self.orders, self.follower, self.leader, self.comparisons, partial(self._begin_to_lead, new.on_lead)
        )
        wire.take = partial(self.leader.report, node.peers.node)
        node.eyes, node.advance = eyes, self._advance
        node.report, node.order, node.forward = self.orders.report, wire.order, wire.forward
        run.status.of_group = self._shown
        run.requests.inject, run.requests.eyes, run.requests.repairs = self.inject, eyes, self.repairs
        run.requests.leader = self.leader

    # Where it is decided what comes of something: here, or by the agent that leads.

    def report(self, report: node_messages.Report) -> None:
        """Something has happened on this node, or was asked for here."""
        if self._node.peers.is_follower:
            self.follower.report(report)
        else:
            self.wire.report(report)

    def _advance(self, event: Event) -> None:
        """Something is found out that the state machine has to answer."""
        if self._node.peers.is_follower:
            self._node.log("not_decided", what=type(event).__name__)
            return
        self.coordinator.advance(event)
        if isinstance(event, recovery.RanksCompared):  # an agent that leads next needs it for what it saves
            self.leader.share()

    def watch_peers(self) -> None:
        """Listen to the agents of the other nodes from now on."""
        node, pool = self._node, self._node.peers.pool
        if pool is not None:
            pool.is_ending = lambda: node.is_ending
        node.peers.watch(node.selector, self._take, self._lose, self.leader.welcome)

    def _take(self, number: int, message: Any) -> None:
        """The agent of another node has sent something."""
        if self._node.peers.is_follower:
            self.follower.take_order(message)
        else:
            self.leader.take(number, message)

    def _lose(self, number: int, why: str) -> None:
        """The agent of another node is lost."""
        if self._node.is_paused:
            return
        if self._node.peers.is_follower:
            self.succession.begin(number, why)
        else:
            self.leader.lose(number, why)

    def _begin_to_lead(self, on_lead: Callable[[], None]) -> None:
        self.watch_peers()
        on_lead()

    def inject(self, fault: str) -> str:
        """A fault is asked for; returns the answer for the user. Raises ValueError if it cannot be carried out."""
        if self._node.peers.is_follower:
            self._run.injections.check(fault)
            self.report(node_messages.FaultAsked(fault))
            return f"ordered from {self._node.peers.leaders_name}, whose event log says what has come of it"
        return self._run.injections.order(fault, "inject-fault")

    def end_turn(self) -> None:
        """All that had come was taken: send and decide what was put off for more of the same."""
        node = self._node
        if not node.peers.is_follower:
            self.wire.drain()
            if not node.is_paused:
                self.leader.decide_lost()
            self.reports.pass_on()
        node.send_shared()
        node.domains.look("incident notes", self._run.incidents.look)

    def look(self) -> None:
        """Time has passed."""
        run, node, look = self._run, self._node, self._node.domains.look
        self.watch.look()
        self.orders.look()
        if not node.peers.is_follower:
            self.leader.look()
            self.repairs.look()
            self.hang_detector.look()
        elif self.follower.look():
            for silent in node.peers.silent(node.has_stepped()):
                self._lose(silent, f"nothing was heard of it for {node.peers.unheard_s(silent):.0f} s")
        if node.peers.is_follower:
            self.succession.look()
        look("search for ranks without hooks", run.unseen.look)
        look("standbys", run.standby_watch.look)
        if not node.peers.is_follower:
            look("snapshots", self.snapshots.look)
            look("checkpoints in the background", run.checkpoint_writer.look)
            look("times for checkpoints", run.quiesce_schedule.look)

    def _shown(self) -> OfGroup:
        newest = self.snapshots.newest
        return OfGroup(
            self._restarts_left,
            self.placement.waited_for or self.membership.waits,
            None if newest is None else newest.boundary,
            self.membership.quarantined(),
        )

    def close(self) -> None:
        """The ranks are gone: give back what was kept of them."""
        self.checkpoints.drop()
        self.again.end()
        self.snapshots.close()
        self.mirrors.close()
        self.memory.close()

    def begin_anew(self, reason: str) -> None:
        """The supervisor has failed, and goes on from what the machine knows and from how the processes are."""
        node, is_lost = self._node, recovery.RankState.LOST
        if node.peers.is_follower:
            self.watch.report_missed({})
            return
        members = enumerate(node.job.members)
        known = {rank: 0 if each.pid is None and each.life is not is_lost else each.pid for rank, each in members}
        self.watch.report_missed(known)
        repairs = [rank for rank, own in node.job.alone.items() if own.incident is not None]
        for rank in (*repairs, None):
            node.advance(recovery.SupervisorRenewed(at_s=time.monotonic(), reason=reason, rank=rank))
