"""Copies of records as they cross nodes: from the node that keeps them to the one that takes a lost node's slots."""

from __future__ import annotations

import base64
import zlib

import msgpack

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.capture.records.recorder import NO_BOUNDARY, Recorder
from ttprun.protocol.board import Field


def give(node: Node, rank: int) -> str:
    """What this node keeps of a rank of the node before it; "" if that is nothing."""
    kept = kept_of(node, rank)
    if kept.newest == NO_BOUNDARY:
        return ""
    return base64.b64encode(zlib.compress(msgpack.packb(kept.export(kept.newest)), 1)).decode()


def kept_of(node: Node, rank: int) -> Recorder:
    """The records that this node keeps of a rank of the node before it."""
    return node.copies_in(node.slots[(rank + len(node.here)) % len(node.slots)])


def restore(node: Node, slot: RankSlot, part: str) -> None:
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
