"""What replicas have alike in their records of a boundary: a lost rank's must be those of the rank that repairs it."""

from __future__ import annotations

import hashlib

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.capture.records.packing import pack
from ttprun.protocol import to_rank


def of(node: Node, slot: RankSlot, boundary: int) -> str:
    """A hash of what replicas have alike in a rank's record; "" if it has left no record of the boundary.

    slot   of a rank of this node
    """
    record = node.recorded(slot, boundary)
    if record is None:
        return ""
    return hashlib.sha256(pack([record.weights, record.held, record.stepped])).hexdigest()


def why_not_alike(order: to_rank.Replay, mine: str) -> str:
    """Why a lost rank's record shows that it was no replica of its source; "" if it was.

    mine   the fingerprint of the lost rank's record
    """
    if not mine:
        return f"rank {order.rank} has left no record of boundary {order.boundary}"
    if order.fingerprint is None or mine == order.fingerprint:
        return ""
    differ = f"rank {order.rank} and rank {order.source} held different weights at boundary {order.boundary}"
    return f"{differ}: they do not replicate each other"
