"""The parts of the agent: those of the whole run, and those that are made and dropped with a group of ranks."""

from __future__ import annotations

import time
from functools import partial

from ttprun import recovery
from ttprun.agent.between.follower import Follower
from ttprun.agent.between.roles import Following, Leading
from ttprun.agent.between.succession import Succession
from ttprun.agent.launcher.resume import Resumption
from ttprun.agent.lead.checkpoints import Checkpoints
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.conduct import Coordinator, Deadlines
from ttprun.agent.lead.frameworks import Frameworks
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.incidents import Incidents, Protection
from ttprun.agent.lead.leader import Leader
from ttprun.agent.lead.membership import Elasticity, NodeMembership, Spares
from ttprun.agent.lead.repairs import Repairs, Replays, Rewinds
from ttprun.agent.lead.reports import Reports
from ttprun.agent.lead.schedules import QuiesceSchedule, SnapshotTimes
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.agent.lead.status_publisher import OfGroup, StatusPublisher
from ttprun.agent.lead.wire import Wire
from ttprun.agent.lead.writer import CheckpointWriter
from ttprun.agent.node.control_socket import Requests
from ttprun.agent.node.mirrors import Mirrors
from ttprun.agent.node.node import Node
from ttprun.agent.node.node_agent import NodeAgent
from ttprun.agent.node.own_states import OwnStates
from ttprun.agent.node.process_watch import ProcessWatch
from ttprun.agent.node.standbys import Standbys, StandbyWatch
from ttprun.agent.node.stored_states import new_buffers
from ttprun.agent.node.unhooked_ranks import UnhookedRanks
from ttprun.agent.node.verdict import NewGroup
from ttprun.chaos.injections import Injections
from ttprun.protocol.reason import Reason
from ttprun.state.store import CheckpointStore


class Run:
    """What outlives the groups of ranks of one launcher.

    announced   why ranks cannot be repaired, as far as the console was told
    """

    def __init__(self, node: Node, store: CheckpointStore, resumption: Resumption, elasticity: Elasticity) -> None:
        rungs = node.job.settings.rungs
        is_replaced = "replace" in rungs or (node.config.mindio and "resize" in rungs)
        self.node = node
        self.resumption = resumption
        self.elasticity = elasticity
        self.standbys = Standbys(node.config.standbys if is_replaced else 0, str(node.run.path), node.config.follow)
        self.standby_watch = StandbyWatch(node, self.standbys)
        self.quiesce_schedule = QuiesceSchedule(node)
        self.injections = Injections(node, self.standbys)
        self.incidents = Incidents(node)
        self.times = SnapshotTimes(node)
        self.checkpoint_writer = CheckpointWriter(node, store, resumption)
        self.unseen = UnhookedRanks(node)
        self.status = StatusPublisher(node, self.incidents, self.standbys, self.checkpoint_writer)
        self.requests = Requests(node, self.checkpoint_writer, self.quiesce_schedule)
        self.announced: set[Reason] = set()
        node.domains.clean_with("standbys", self.standby_watch.begin_anew)


class Group:
    """The parts of the agent for one group of ranks, made from the bottom up; the node has begun with the group.

    First what this node does for its ranks, then what is decided for all if its agent leads.
    """

    def __init__(self, run: Run, new: NewGroup) -> None:
        node, times, incidents = run.node, run.times, run.incidents
        self._node = node
        self._restarts_left = new.restarts_left
        self._incidents = incidents
        run.standbys.begin_preloads(node.loops)
        times.begin_anew()
        self.own_states = OwnStates(node, times)
        self.mirrors = Mirrors(node)
        buffers = new_buffers(len(node.here))
        self.watch = ProcessWatch(
            *(node, self.own_states, self.mirrors, buffers, times, run.injections, run.unseen, run.standby_watch)
        )
        self.agent = NodeAgent(
            node,
            injections=run.injections,
            mirrors=self.mirrors,
            own_states=self.own_states,
            standbys=run.standbys,
            standby_watch=run.standby_watch,
            watch=self.watch,
            replace_handler=new.replace_handler,
        )
        self.wire = wire = Wire(node, self.agent)
        self.comparisons = Comparisons(node, wire, times, incidents, self.mirrors)
        self.checkpoints = Checkpoints(node, wire, run.checkpoint_writer, self.comparisons)
        self.snapshots = Snapshots(node, times, self.comparisons, self.checkpoints, buffers)
        self.repairs: Repairs = (
            Frameworks(node) if node.config.mindio else Replays(node, wire, self.comparisons, self.checkpoints)
        )
        self.hang_detector = HangDetector(node, self.repairs, self.own_states)
        self.deadlines = Deadlines(node, self.hang_detector)
        reports = Reports(
            node,
            wire,
            comparisons=self.comparisons,
            checkpoints=self.checkpoints,
            incidents=incidents,
            injections=run.injections,
            hang_detector=self.hang_detector,
            own_states=self.own_states,
            protection=Protection(node, self.own_states, run.announced),
            repairs=self.repairs,
            snapshots=self.snapshots,
        )
        self.membership = NodeMembership(node, run.resumption, run.quiesce_schedule, run.elasticity, new.attempt)
        self.spares = Spares(node, wire, self.membership)
        self.leader = Leader(node, self.own_states, reports, self.spares, self.membership, run.quiesce_schedule)
        coordinator = Coordinator(
            node,
            wire,
            membership=self.membership,
            spares=self.spares,
            checkpoints=self.checkpoints,
            incidents=incidents,
            repairs=self.repairs,
            rewinds=Rewinds(
                *(node, wire, run.resumption, self.comparisons, self.snapshots, self.own_states),
                self.checkpoints,
            ),
            hang_detector=self.hang_detector,
            deadlines=self.deadlines,
            leader=self.leader,
        )
        leading = Leading(
            node,
            wire,
            coordinator,
            self.leader,
            reports,
            checkpoint_writer=run.checkpoint_writer,
            hang_detector=self.hang_detector,
            repairs=self.repairs,
            snapshots=self.snapshots,
            standby_watch=run.standby_watch,
            quiesce_schedule=run.quiesce_schedule,
            unseen=run.unseen,
        )
        follower = Follower(node, self.agent, run.status)
        succession = Succession(node, self.agent, follower, self.leader, leading, self.comparisons, new.on_lead)
        following = Following(node, follower, succession, run.standby_watch, run.unseen)
        wire.take = partial(self.leader.report, node.peers.node)
        node.report, node.order, node.forward = self.agent.report, wire.order, wire.forward
        node.take_role(following if node.peers.is_follower else leading)
        run.status.of_group = self._shown

    def _shown(self) -> OfGroup:
        newest = self.snapshots.newest
        return OfGroup(
            self._restarts_left,
            self.spares.waited_for or self.membership.waits,
            None if newest is None else newest.boundary,
            self.membership.quarantined(),
        )

    def close(self) -> None:
        """The ranks are gone: give back what was kept of them."""
        self.checkpoints.drop()
        self.snapshots.close()
        self.mirrors.close()
        self.own_states.close()

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
        self._node.domains.look("incident notes", self._incidents.look)

    def look(self) -> None:
        """Time has passed."""
        self.watch.look()
        self.agent.look()
        self._node.role.look()
