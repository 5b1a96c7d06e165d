"""What this node has of ranks' records: fingerprints of its own ranks', copies of those of the node before it.

A lost rank's record must have the fingerprint of the rank that repairs it. Copies cross nodes: from the node that keeps
them to the one that takes a lost node's slots.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

import msgpack

from ttprun.agent.node.node import Node
from ttprun.agent.node.process import Process
from ttprun.capture.records.packing import pack
from ttprun.capture.records.recorder import NO_BOUNDARY, Recorder
from ttprun.protocol import to_rank
from ttprun.protocol.board import Field
from ttprun.protocol.reason import Reason

NO_RECORD = "there is no record of that step"


def give_copy(node: Node, rank: int) -> str:
    """What this node keeps of a rank of the node before it; "" if that is nothing."""
    kept = kept_of(node, rank)
    if kept.newest == NO_BOUNDARY:
        return ""
    return base64.b64encode(zlib.compress(msgpack.packb(kept.export(kept.newest)), 1)).decode()


def kept_of(node: Node, rank: int) -> Recorder:
    """The records that this node keeps of a rank of the node before it."""
    return node.copies_in(node.process((rank + len(node.here)) % len(node.slots)))


def restore_copy(node: Node, slot: Process, part: str) -> None:
    """Let a slot of this node be as the lost rank has left it.

    slot   which has been given to this node
    part   as `give` of the node that keeps the copies returns it, not ""

    Raises RecordTooLargeError.
    """
    recorder = node.new_recorder(slot)
    recorder.restore(msgpack.unpackb(zlib.decompress(base64.b64decode(part)), strict_map_key=False))
    newest = recorder.newest
    slot.take_place_of_lost(newest)
    for column in (Field.RECORDED, Field.APPLIED):
        node.board.set(slot.rank, column, newest)


def fingerprint_of(node: Node, slot: Process, boundary: int) -> str:
    """A hash of what replicas have alike in a rank's record; "" if it has left no record of the boundary.

    slot   of a rank of this node
    """
    record = node.recorded(slot, boundary)
    if record is None:
        return ""
    return hashlib.sha256(pack([record.weights, record.held, record.stepped])).hexdigest()


def why_not_alike(order: to_rank.Replay, mine: str) -> Reason:
    """Why a lost rank's record shows that it was no replica of its source; "" if it was.

    mine   the fingerprint of the lost rank's record
    """
    if not mine:
        return Reason("not-compared", f"rank {order.rank} has left no record of boundary {order.boundary}")
    if order.fingerprint is None or mine == order.fingerprint:
        return Reason()
    differ = f"rank {order.rank} and rank {order.source} held different weights at boundary {order.boundary}"
    return Reason("other-weights", f"{differ}: they do not replicate each other")


def own_part(node: Node, rank: int, boundary: int) -> bytes:
    """What a checkpoint has of a rank alone: of this node, or of the one before it, whose records this one keeps.

    boundary   of the checkpoint
    returns    msgpack of its records

    Raises KeyError if there is no record of the boundary.
    """
    recorder = node.recorder_of(node.process(rank)) if node.is_here(rank) else kept_of(node, rank)
    packed: bytes = msgpack.packb(recorder.export(boundary))
    return packed
