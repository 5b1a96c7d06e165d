"""Who carries out what the coordinator orders: one actuator a node, in this process or at the end of a connection.

What they can be ordered is `node_orders.Order`; what comes of it comes back as an event or a report. Begin with
`NodeActuator`; the one of this process is `ttprun.agent.node.node_agent`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ttprun.agent.node.node import Node
from ttprun.protocol import channel, node_orders, process_orders


class NodeActuator(ABC):
    """Carries out orders on one node."""

    @abstractmethod
    def carry_out(self, order: node_orders.Order) -> None:
        """Carry out one order; returns at once."""

    @abstractmethod
    def forward(self, rank: int, message: channel.Order) -> None:
        """Send to the process of a rank, with what only its node knows; it is held until the process has greeted."""

    @abstractmethod
    def fingerprint(self, rank: int, boundary: int) -> str:
        """What replicas have alike in their records of a boundary, hashed; "" if the rank has left no record of it."""


class RemoteActuator(NodeActuator):
    """Has the follower of another node carry out orders, and notes here what follows from them."""

    def __init__(self, node: Node, number: int) -> None:
        self._node = node
        self._number = number

    def carry_out(self, order: node_orders.Order) -> None:
        self._node.peers.send(self._number, order)
        self.note(order)

    def note(self, order: node_orders.Order) -> None:
        """What follows here from an order that was sent."""
        node = self._node
        match order:
            case process_orders.KillRank(rank=rank, reason=reason):
                slot = node.slots[rank]
                node.log("rank_killed", rank=rank, pid=slot.pid, reason=reason, stack="")
                slot.lose_elsewhere(node.board)
            case process_orders.Rewind(ranks=ranks, boundary=boundary):
                for rank in ranks:
                    node.go_back(node.slots[rank], boundary)

    def forward(self, rank: int, message: channel.Order) -> None:
        self._node.slots[rank].send(message)

    def fingerprint(self, rank: int, boundary: int) -> str:
        elsewhere = self._node.slots[rank].elsewhere
        return "" if elsewhere is None else elsewhere.fingerprints.get(boundary, "")


class Actuators:
    """Those of all nodes of a group; `own` is this node's."""

    def __init__(self, node: Node, own: NodeActuator) -> None:
        self._node = node
        self._by_node = [
            own if number == node.peers.node else RemoteActuator(node, number) for number in range(node.peers.size)
        ]

    def on(self, number: int) -> NodeActuator:
        """The one of a node."""
        return self._by_node[number]

    def of(self, rank: int) -> NodeActuator:
        """The one of the node on which a rank is."""
        return self._by_node[self._node.peers.node_of(rank)]

    def order(self, rank: int, order: node_orders.Order) -> None:
        """Have the node on which a rank is carry it out."""
        self.of(rank).carry_out(order)

    def order_all(self, order: node_orders.Order) -> None:
        """Have all nodes carry it out, this one last: the others do it meanwhile."""
        self._node.peers.to_all(order)
        for actuator in self._by_node:
            if isinstance(actuator, RemoteActuator):
                actuator.note(order)
        self._by_node[self._node.peers.node].carry_out(order)
