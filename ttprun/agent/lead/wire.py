"""The wire between what is decided and the nodes: this one in the same process, the others at the end of connections.

Orders go out (`node_messages.Order`), and messages to the processes of ranks; what comes of them comes back as reports.
Which node a rank is on changes nothing here but the way. Begin with `Wire.order_on` and `Wire.report`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ttprun.agent.node.node import Node
from ttprun.protocol import process_orders
from ttprun.protocol.node_messages import Order, Report


class Carrier(Protocol):
    """Carries out orders for the ranks of one node."""

    def carry_out(self, order: Order) -> None:
        """Carry out one order; returns at once."""

    def forward(self, rank: int, pid: int, message: Any) -> None:
        """Send to the process of a rank, with what only its node knows; it is held until the process has greeted."""


class Wire:
    """That of one group of ranks.

    own    carries out orders here
    take   called with what this node reports, one after the other
    """

    def __init__(self, node: Node, own: Carrier) -> None:
        self._node = node
        self._own = own
        self.take: Callable[[Report], None] = lambda report: None
        self._reports: deque[Report] = deque()
        self._is_taking = False

    def report(self, report: Report) -> None:
        """Something has happened on this node; what happens because of it is taken after it."""
        self._reports.append(report)
        self.drain()

    def drain(self) -> None:
        """Have all taken that was reported here; after a failure this goes on behind what has failed."""
        if self._is_taking:
            return
        self._is_taking = True
        try:
            while self._reports:
                self.take(self._reports.popleft())
        finally:
            self._is_taking = False

    def order(self, rank: int, order: Order) -> None:
        """Have the node on which a rank is carry it out."""
        self.order_on(self._node.peers.node_of(rank), order)

    def order_on(self, number: int, order: Order) -> None:
        """Have a node carry it out."""
        if number == self._node.peers.node:
            self._own.carry_out(order)
        else:
            self._node.peers.send(number, order)
        self._note(order)

    def order_all(self, order: Order) -> None:
        """Have all nodes carry it out, this one last: the others do it meanwhile."""
        self._node.peers.to_all(order)
        self._own.carry_out(order)
        self._note(order)

    def forward(self, rank: int, pid: int, message: Any) -> None:
        """Have its node send a message to the process of a rank."""
        peers = self._node.peers
        if self._node.is_here(rank):
            self._own.forward(rank, pid, message)
        else:
            peers.forward(rank, pid, peers.line_of(message))

    def _note(self, order: Order) -> None:
        """What follows here from an order that was given."""
        node = self._node
        match order:
            case process_orders.KillRank(rank=rank, reason=reason):
                slot = node.slots[rank]
                if not slot.is_here:  # else it is logged when its stack is known
                    node.log("rank_killed", rank=rank, pid=slot.pid, reason=reason, stack="")
                slot.lose(node.board)
            case process_orders.Rewind(ranks=ranks, boundary=boundary):
                for slot in (node.slots[rank] for rank in ranks):
                    if slot.is_here:
                        slot.go_back_to(boundary)
                    else:
                        node.go_back(slot, boundary)
