"""gloo: the CPU's tensors, over TCP."""

from __future__ import annotations

from ttprun.rank.comm.connection import Connection
from ttprun.rank.comm.transports.link import Link, Seat


def make_gloo(seat: Seat) -> Link:
    """Connect; see `Transport.make`."""
    connection = Connection(seat.exchange, seat.generation, seat.key, seat.rank, seat.size, seat.op_limit)
    connection.native._set_group_name(seat.name)
    return connection
