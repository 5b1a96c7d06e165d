"""gloo: the CPU's tensors, over TCP."""

from __future__ import annotations

from ttprun.groups.connection import Connection
from ttprun.groups.transports.link import GroupMember, Link


def make_gloo(member: GroupMember) -> Link:
    """Connect; see `Transport.make`."""
    connection = Connection(member.exchange, member.generation, member.key, member.rank, member.size, member.op_limit)
    connection.native._set_group_name(member.name)
    return connection
