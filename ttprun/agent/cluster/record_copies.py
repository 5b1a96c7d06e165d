"""Copies of records as they cross nodes: from the node that keeps them to the one that takes a lost node's seats."""

from __future__ import annotations

import base64
import zlib

import msgpack

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import Seat
from ttprun.protocol.board import Field
from ttprun.rank.records.recorder import NO_BOUNDARY, Recorder


def give(node: Node, rank: int) -> str:
    """What this node keeps of a rank of the node before it; "" if that is nothing."""
    kept = kept_of(node, rank)
    if kept.newest == NO_BOUNDARY:
        return ""
    return base64.b64encode(zlib.compress(msgpack.packb(kept.export(kept.newest)), 1)).decode()


def kept_of(node: Node, rank: int) -> Recorder:
    """The records that this node keeps of a rank of the node before it."""
    return node.copies_in(node.seats[(rank + len(node.here)) % len(node.seats)])


def restore(node: Node, seat: Seat, part: str) -> None:
    """Let a seat of this node be as the lost rank has left it. Raises RecordTooLargeError."""
    recorder = node.new_recorder(seat)
    recorder.restore(msgpack.unpackb(zlib.decompress(base64.b64decode(part)), strict_map_key=False))
    newest = recorder.newest
    seat.had_torch = True
    seat.is_lost = True
    seat.go_back_to(newest)
    out, err = node.recorded(seat, newest).get("lines", [0, 0])
    values = {Field.RECORDED: newest, Field.APPLIED: newest, Field.LINES_OUT: out, Field.LINES_ERR: err}
    for column, value in values.items():
        node.board.set(seat.rank, column, value)
