"""What crosses the wire between the lead and its own node, as it crosses to another one: encoded, and decoded again."""

from __future__ import annotations

from typing import Any, get_args

from ttprun.agent.lead.rows import Wire
from ttprun.protocol import node_messages as nodes
from ttprun.protocol.codec import decode, encode

_KNOWN = {kind.__name__: kind for kind in (*get_args(nodes.Report), *get_args(nodes.Order), nodes.Forward)}


class EncodedWire(Wire):
    """A wire on which nothing stays as it is, although both ends are in one process."""

    def __init__(self, node: Any, own: Any) -> None:
        super().__init__(node, EncodedCarrier(node, own))

    def report(self, report: Any) -> None:
        size = len(self._node.slots)
        if isinstance(report, nodes.Said):
            said: nodes.Said = through(report.encoded(size, nodes.Rows(0, [])))
            super().report(said.decoded(size))
        else:
            super().report(through(report))


class EncodedCarrier:
    """Gets orders as another node gets them."""

    def __init__(self, node: Any, own: Any) -> None:
        self._node = node
        self._own = own

    def carry_out(self, order: Any) -> None:
        self._own.carry_out(through(order))

    def forward(self, rank: int, pid: int, message: Any) -> None:
        size = len(self._node.slots)
        forward: nodes.Forward = through(nodes.Forward([(rank, pid)], nodes.encoded(message, size)))
        self._own.forward(rank, pid, forward.message(size))


def through(message: Any) -> Any:
    """A message as it comes at the other end."""
    return decode(encode(message), _KNOWN)
