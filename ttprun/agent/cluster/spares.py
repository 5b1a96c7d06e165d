"""The slots of a lost node are given to a launcher that waits (`spare_pool.py`): a spare, or a node that comes back.

Its ranks need what the lost ones have recorded: copies of that are on the node after the lost one. Begin with
`Spares.spawn`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from ttprun.agent.cluster.actuators import Actuators
from ttprun.agent.cluster.membership import NodeMembership
from ttprun.agent.core.node import Node
from ttprun.protocol import node_orders, node_reports, process_orders
from ttprun.protocol.rank_events import SpawnFailed

logger = logging.getLogger("ttprun")


@dataclass
class Vacancy:
    """The slots of one lost node.

    spawns   orders that wait for a node, or for its records, by rank
    due      ranks whose records have not come; None: no launcher has taken the slots
    """

    since_s: float
    spawns: dict[int, process_orders.SpawnRank] = field(default_factory=dict)
    due: set[int] | None = None


class Spares:
    """Gives the slots of lost nodes away.

    membership   knows which nodes may train
    """

    def __init__(self, node: Node, actuators: Actuators, membership: NodeMembership) -> None:
        self._node = node
        self._actuators = actuators
        self._vacant: dict[int, Vacancy] = {}
        self._membership = membership

    @property
    def waited_for(self) -> str:
        """What the ranks that are left wait for; "" if they do not."""
        lost = [number for number, vacancy in self._vacant.items() if vacancy.due is None]
        if not lost:
            return ""
        since_s = min(self._vacant[number].since_s for number in lost)
        left_s = max(0.0, self._node.config.node_wait_s - (time.monotonic() - since_s))
        names = ", ".join(map(self._node.peers.name_of, lost))
        return f"{names} is lost: waiting {left_s:.0f} s more for a launcher to take its place (--node-wait-s)"

    def begin_group(self) -> None:
        """All nodes are there."""
        self._vacant.clear()

    def spawn(self, action: process_orders.SpawnRank) -> None:
        """Give a rank a process; if its node is lost, another one is waited for."""
        peers = self._node.peers
        number = peers.node_of(action.rank)
        vacancy = self._vacant.get(number)
        if vacancy is None and peers.is_connected(number):
            self._actuators.on(number).carry_out(action)
            return
        if vacancy is None:
            vacancy = self._vacant[number] = Vacancy(time.monotonic())
        vacancy.spawns[action.rank] = action
        self.fill()

    def forget(self, number: int) -> None:
        """A node is lost, perhaps the one that has just taken these slots."""
        self._vacant.pop(number, None)

    def lose_copies(self, keeper: int) -> None:
        """A node is lost: what it kept of the node before it, and has not sent, will not come."""
        before = (keeper - 1) % self._node.peers.size
        vacancy = self._vacant.get(before)
        for rank in sorted(vacancy.due or ()) if vacancy is not None else ():
            self.take_records(node_reports.Records(rank, ""))

    def fill(self) -> None:
        """Give the slots of lost nodes to launchers that wait, as far as there are any."""
        peers = self._node.peers
        for number, vacancy in list(self._vacant.items()):
            if vacancy.due is not None or not vacancy.spawns:
                continue
            address = peers.slot(number, self._membership.may_train)
            if address is None:
                return
            self._node.log("node_replaced", node=number, address=address, waited_s=time.monotonic() - vacancy.since_s)
            logger.warning("%s takes the place of the lost node %d", peers.shown(number), number)
            ranks = range(number * peers.ranks_per_node, (number + 1) * peers.ranks_per_node)
            vacancy.due = set(ranks)
            self._ask_for_records(number, list(ranks))

    def _ask_for_records(self, number: int, ranks: list[int]) -> None:
        """They are on the next node."""
        peers = self._node.peers
        keeper = (number + 1) % peers.size
        if peers.is_connected(keeper):
            self._actuators.on(keeper).carry_out(node_orders.GiveRecords(ranks))
        else:
            for rank in ranks:
                self.take_records(node_reports.Records(rank, ""))

    def take_records(self, records: node_reports.Records) -> None:
        """The records of a lost rank have come, or word that there are none."""
        peers, rank = self._node.peers, records.rank
        number = peers.node_of(rank)
        vacancy = self._vacant.get(number)
        if vacancy is None or vacancy.due is None:
            return  # another node has been lost meanwhile
        peers.send(number, records)
        vacancy.due.discard(rank)
        if not records.part:
            self._fail(vacancy, rank, "no copy of its records has reached another node")
        if vacancy.due or number not in self._vacant:
            return
        del self._vacant[number]
        source = self._node.job.source
        if source is not None:
            self._actuators.on(number).carry_out(node_orders.VoidBeyond(source.boundary))
        for action in vacancy.spawns.values():
            self._actuators.on(number).carry_out(action)

    def look(self) -> None:
        """Time has passed: who waits may train by now, and nobody waits for ever."""
        self.fill()
        limit_s = self._node.config.node_wait_s
        for number, vacancy in list(self._vacant.items()):
            if vacancy.due is not None or not vacancy.spawns:
                continue
            name = self._node.peers.name_of(number)
            why = f"{name} is lost, and no other took its place within {limit_s:g} s (--node-wait-s)"
            if self._membership.may_shrink():
                why = f"{name} is lost, and the nodes that are left are enough (--elastic)"
            elif time.monotonic() - vacancy.since_s < limit_s:
                continue
            for rank in list(vacancy.spawns):
                self._fail(vacancy, rank, why)

    def _fail(self, vacancy: Vacancy, rank: int, reason: str) -> None:
        if vacancy.spawns.pop(rank, None) is not None:
            self._node.log("spawn_failed", rank=rank, reason=reason)
            self._node.advance(SpawnFailed(at_s=time.monotonic(), rank=rank, reason=reason))
