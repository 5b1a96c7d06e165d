"""The parts of the agent: how they are put together, and what all of them are called for."""

from __future__ import annotations

import time

from ttprun import recovery
from ttprun.agent.between.follower import Follower
from ttprun.agent.between.roles import Following, Leading
from ttprun.agent.between.succession import Succession
from ttprun.agent.launcher.resume import Resumption
from ttprun.agent.lead.actuators import Actuators
from ttprun.agent.lead.checkpoints import Checkpoints
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.conduct import Coordinator, Deadlines
from ttprun.agent.lead.frameworks import Frameworks
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.incidents import Incidents
from ttprun.agent.lead.leader import Leader
from ttprun.agent.lead.membership import Elasticity, NodeMembership, Spares
from ttprun.agent.lead.protection import Protection
from ttprun.agent.lead.repairs import Repairs, Replays
from ttprun.agent.lead.reports import Reports
from ttprun.agent.lead.rewinds import Rewinds
from ttprun.agent.lead.schedules import QuiesceSchedule, SnapshotTimes
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.agent.lead.status_publisher import StatusPublisher
from ttprun.agent.lead.writer import CheckpointWriter
from ttprun.agent.node.control_socket import Requests
from ttprun.agent.node.mirrors import Mirrors
from ttprun.agent.node.node import Node
from ttprun.agent.node.node_agent import NodeAgent
from ttprun.agent.node.own_states import OwnStates
from ttprun.agent.node.process_watch import ProcessWatch
from ttprun.agent.node.standbys import Standbys, StandbyWatch
from ttprun.agent.node.unhooked_ranks import UnhookedRanks
from ttprun.agent.node.verdict import NewGroup
from ttprun.chaos.injections import Injections
from ttprun.state.store import CheckpointStore


class Parts:
    """All parts, each with those that it uses: they are made from the bottom up."""

    def __init__(
        self,
        node: Node,
        store: CheckpointStore,
        resumption: Resumption,
        elasticity: Elasticity,
    ) -> None:
        rungs = node.job.settings.rungs
        is_replaced = "replace" in rungs or (node.config.mindio and "resize" in rungs)
        self.standbys = Standbys(node.config.standbys if is_replaced else 0, str(node.run.path), node.config.follow)
        self.standby_watch = StandbyWatch(node, self.standbys)
        self.quiesce_schedule = QuiesceSchedule(node)
        self.actuators = Actuators(node)
        self.injections = Injections(node, self.actuators, self.standbys)
        self.incidents = incidents = Incidents(node)
        times = SnapshotTimes(node)
        self.own_states = OwnStates(node, times)
        self.mirrors = Mirrors(node)
        self.comparisons = Comparisons(node, self.actuators, times, incidents, self.mirrors)
        self.checkpoint_writer = CheckpointWriter(node, store, resumption)
        self.checkpoints = Checkpoints(node, self.actuators, self.checkpoint_writer, self.comparisons)
        self.snapshots = Snapshots(node, times, self.comparisons, self.checkpoints)
        self.repairs: Repairs = (
            Frameworks(node)
            if node.config.mindio
            else Replays(node, self.actuators, self.comparisons, self.checkpoints)
        )
        self.hang_detector = HangDetector(node, self.repairs, self.own_states)
        self.deadlines = Deadlines(node, self.hang_detector)
        protection = Protection(node, times, self.own_states)
        self.unseen = UnhookedRanks(node)
        self.reports = Reports(
            node,
            self.actuators,
            comparisons=self.comparisons,
            checkpoints=self.checkpoints,
            incidents=incidents,
            injections=self.injections,
            hang_detector=self.hang_detector,
            own_states=self.own_states,
            protection=protection,
            repairs=self.repairs,
            snapshots=self.snapshots,
        )
        self.watch = ProcessWatch(
            node, self.own_states, self.mirrors, self.snapshots, self.injections, self.unseen, self.standby_watch
        )
        self.membership = NodeMembership(node, resumption, self.quiesce_schedule, elasticity)
        self.spares = Spares(node, self.actuators, self.membership)
        rewinds = Rewinds(
            node,
            self.actuators,
            resumption,
            self.comparisons,
            self.snapshots,
            self.own_states,
            self.mirrors,
            self.checkpoints,
        )
        self.agent = NodeAgent(
            node,
            hang_detector=self.hang_detector,
            injections=self.injections,
            mirrors=self.mirrors,
            rewinds=rewinds,
            standbys=self.standbys,
            standby_watch=self.standby_watch,
            watch=self.watch,
        )
        self.leader = Leader(node, self.own_states, self.reports, self.spares, self.membership, self.quiesce_schedule)
        self.coordinator = Coordinator(
            node,
            self.actuators,
            membership=self.membership,
            spares=self.spares,
            checkpoints=self.checkpoints,
            incidents=incidents,
            repairs=self.repairs,
            rewinds=rewinds,
            deadlines=self.deadlines,
            leader=self.leader,
        )
        self.status = StatusPublisher(
            node,
            incidents,
            self.standbys,
            self.checkpoint_writer,
            self.snapshots,
            self.spares,
            self.membership,
        )
        self.leading = Leading(
            node,
            self.coordinator,
            self.leader,
            self.reports,
            checkpoint_writer=self.checkpoint_writer,
            hang_detector=self.hang_detector,
            repairs=self.repairs,
            snapshots=self.snapshots,
            standby_watch=self.standby_watch,
            quiesce_schedule=self.quiesce_schedule,
            unseen=self.unseen,
        )
        self.follower = Follower(node, self.agent, self.status)
        self.succession = Succession(node, self.agent, self.follower, self.leader, self.leading, self.comparisons)
        self.following = Following(node, self.follower, self.succession, self.standby_watch, self.unseen)
        node.report = self.agent.report
        node.take_role(self.leading)
        self._node = node
        node.domains.clean_with("standbys", self.standby_watch.begin_anew)
        self.requests = Requests(node, self.checkpoint_writer, self.repairs, self.quiesce_schedule)

    def begin_group(self, group: NewGroup) -> None:
        """All ranks are new; the node has begun with them."""
        self._node.take_role(self.following if self._node.peers.is_follower else self.leading)
        self.standbys.preloads.note_loops(self._node.loops)
        self.actuators.begin_group(self.agent)
        self.agent.begin_group(group.replace_handler)
        self.spares.begin_group()
        self.leader.begin_group()
        self.membership.begin_group(group.attempt)
        self.hang_detector.begin_group()
        self.snapshots.begin_group()
        self.own_states.begin_group()
        self.mirrors.begin_group()
        self.comparisons.begin_group()
        self.reports.begin_group()
        self.repairs.begin_group()
        self.succession.begin_group(group.on_lead)
        self.status.begin_group(group.restarts_left)

    def begin_anew(self, reason: str) -> None:
        """The supervisor has failed, and goes on from what the machine knows and from how the processes are."""
        node = self._node
        self.watch.report_missed()
        if node.peers.is_follower:
            return
        repairs = [rank for rank, own in node.job.alone.items() if own.incident is not None]
        for rank in (*repairs, None):
            node.advance(recovery.SupervisorRenewed(at_s=time.monotonic(), reason=reason, rank=rank))

    def end_turn(self) -> None:
        """All that had come was taken."""
        self._node.role.end_turn()
        self._node.domains.look("incident notes", self.incidents.look)

    def look(self) -> None:
        """Time has passed."""
        self.watch.look()
        self.agent.look()
        self._node.role.look()
