"""The parts of the agent: how they are put together, and what all of them are called for."""

from __future__ import annotations

from ttprun.agent.checkpoint_writer import CheckpointWriter
from ttprun.agent.checkpoints import Checkpoints
from ttprun.agent.comparisons import Comparisons
from ttprun.agent.deadlines import Deadlines
from ttprun.agent.frameworks import Frameworks
from ttprun.agent.hand import Hand
from ttprun.agent.incidents import Incidents
from ttprun.agent.leader import Leader
from ttprun.agent.lookout import Lookout
from ttprun.agent.mirrors import Mirrors
from ttprun.agent.node import Node
from ttprun.agent.orders import Orders
from ttprun.agent.own_state import OwnStates
from ttprun.agent.protection import Protection
from ttprun.agent.repairs import Repairs
from ttprun.agent.replays import Replays
from ttprun.agent.reports import Reports
from ttprun.agent.requests import Requests
from ttprun.agent.resume import Resumption
from ttprun.agent.rewinds import Rewinds
from ttprun.agent.roster import Roster
from ttprun.agent.snapshot_times import SnapshotTimes
from ttprun.agent.snapshots import Snapshots
from ttprun.agent.spares import Spares
from ttprun.agent.standby_watch import StandbyWatch
from ttprun.agent.standbys import Standbys
from ttprun.agent.standing import Standing
from ttprun.agent.status import StatusPublisher
from ttprun.agent.succession import Succession
from ttprun.agent.unseen import Unseen
from ttprun.agent.watch import Watch
from ttprun.chaos.injections import Injections
from ttprun.state.store import CheckpointStore


class Parts:
    """All parts, each with those that it uses: they are made from the bottom up."""

    def __init__(
        self,
        node: Node,
        store: CheckpointStore,
        resumption: Resumption,
    ) -> None:
        rungs = node.job.settings.rungs
        is_replaced = "replace" in rungs or (node.config.mindio and "resize" in rungs)
        self.standbys = Standbys(node.config.standbys if is_replaced else 0, str(node.run.path), node.config.follow)
        self.standby_watch = StandbyWatch(node, self.standbys)
        self.standing = Standing(node)
        self.injections = Injections(node, self.standbys)
        incidents, times = Incidents(node), SnapshotTimes(node)
        self.own_states = OwnStates(node, times)
        self.mirrors = Mirrors(node)
        self.comparisons = Comparisons(node, times, incidents, self.mirrors)
        self.checkpoint_writer = CheckpointWriter(node, store, resumption)
        self.checkpoints = Checkpoints(node, self.checkpoint_writer, self.comparisons, self.mirrors)
        self.snapshots = Snapshots(node, times, self.comparisons, self.checkpoints)
        self.repairs: Repairs = (
            Frameworks(node) if node.config.mindio else Replays(node, self.comparisons, self.checkpoints, self.mirrors)
        )
        self.lookout = Lookout(node, self.repairs, self.own_states)
        self.deadlines = Deadlines(node, self.lookout)
        protection = Protection(node, times, self.own_states)
        self.unseen = Unseen(node, protection)
        self.reports = Reports(
            node,
            comparisons=self.comparisons,
            checkpoints=self.checkpoints,
            incidents=incidents,
            injections=self.injections,
            lookout=self.lookout,
            own_states=self.own_states,
            protection=protection,
            repairs=self.repairs,
            snapshots=self.snapshots,
            standbys=self.standbys,
            standby_watch=self.standby_watch,
        )
        self.watch = Watch(
            node, self.reports, self.own_states, self.mirrors, self.snapshots, self.injections, self.unseen
        )
        self.spares = Spares(node)
        self.roster = Roster(node, resumption, self.standing)
        self.spares.may_shrink = self.roster.may_shrink
        self.orders = Orders(
            node,
            roster=self.roster,
            spares=self.spares,
            checkpoints=self.checkpoints,
            incidents=incidents,
            lookout=self.lookout,
            repairs=self.repairs,
            rewinds=Rewinds(node, resumption, self.comparisons, self.snapshots, self.own_states, self.mirrors),
            standbys=self.standbys,
            standby_watch=self.standby_watch,
            watch=self.watch,
            set_deadline=self.deadlines.set,
        )
        self.leader = Leader(node, self.own_states, self.reports, self.spares, self.roster, self.standing)
        self.status = StatusPublisher(node, incidents, self.standbys, self.checkpoint_writer, self.snapshots)
        self.status.waits_for = lambda: self.spares.waited_for or self.roster.waits
        self.hand = Hand(node, self.orders, self.standby_watch, self.watch, self.status, self.injections)
        self.reports.forward = self.hand.forward
        self.succession = Succession(node, self.hand, self.leader, self.orders, self.comparisons)
        self.hand.lose = self.succession.begin
        self._node = node
        self.requests = Requests(node, self.checkpoint_writer, self.injections, self.repairs, self.standing)

    def begin_group(self) -> None:
        """All ranks are new."""
        self.spares.begin_group()
        self.roster.begin_group()
        self.lookout.begin_group()
        self.snapshots.begin_group()
        self.own_states.begin_group()
        self.mirrors.begin_group()
        self.comparisons.begin_group()
        self.reports.begin_group()
        self.repairs.begin_group()
        self.succession.begin_group()

    def look(self) -> None:
        """Time has passed."""
        self.watch.look()
        if self._node.peers.is_hand:
            self.hand.look()
            self.succession.look()
            self.unseen.look()
            self.standby_watch.look()
            return
        if self._node.peers.is_leading:
            self.leader.look()
        self.repairs.look()
        self.unseen.look()
        self.lookout.look()
        self.standby_watch.look()
        self.snapshots.look()
        self.checkpoint_writer.look()
        self.standing.look()
