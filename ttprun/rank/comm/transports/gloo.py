"""gloo: the CPU's tensors, over TCP."""

from __future__ import annotations

from ttprun.rank.comm.connection import Connection
from ttprun.rank.comm.transports.link import Link, RankSlot


def make_gloo(slot: RankSlot) -> Link:
    """Connect; see `Transport.make`."""
    connection = Connection(slot.exchange, slot.generation, slot.key, slot.rank, slot.size, slot.op_limit)
    connection.native._set_group_name(slot.name)
    return connection
