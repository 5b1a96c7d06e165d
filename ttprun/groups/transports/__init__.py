"""How a group communicates, by the name of its backend. Read TRANSPORTS first.

A `Transport` makes a `Link`: a group's connection in one generation. A recovery aborts the links of all groups and
makes new ones, whose keys are those of the new generation. What the transports differ in ends there: the works that
`Link.issue` returns mean the same for all, see `Link`.
"""

from __future__ import annotations

from ttprun.groups.transports.gloo import make_gloo
from ttprun.groups.transports.late import gives_works, make_hccl, make_nccl
from ttprun.groups.transports.link import GroupMember, Link, Transport

__all__ = ["TRANSPORTS", "GroupMember", "Link", "Transport"]

TRANSPORTS: dict[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport("gloo", frozenset({"cpu"}), make_gloo),
        Transport("nccl", frozenset({"cuda"}), make_nccl, is_late=True, gives_works=gives_works),
        Transport("hccl", frozenset({"npu"}), make_hccl, is_late=True),
    )
}
