"""What this node has of its ranks' states, beside their processes: memory that outlives them. Begin with `Memory`.

A rank that is alone writes to its two slots in turns and says on the board what they hold (`ttprun.tensors.own_state`).
Its records of the newest boundaries are in its recorder anyway; those of an older one it has written out beside its
tensors. Of the ranks of the node before it a node keeps copies of the records: when that node is lost, they cross to
the one that takes its slots. A lost rank's record must have the fingerprint of the rank that repairs it. What ranks
mirror is in `mirrors.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from typing import Any

import msgpack

from ttprun.agent.base import stored_states
from ttprun.agent.base.stored_states import Stored, part_in, path_of
from ttprun.agent.node.mirrors import Slots
from ttprun.agent.node.node import Node, Process
from ttprun.capture.records.packing import pack, read_outline
from ttprun.capture.records.recorder import NO_BOUNDARY, Recorder, records_up_to
from ttprun.protocol import to_rank
from ttprun.protocol.board import SLOTS, Field, slot_that_gives
from ttprun.protocol.reason import Reason
from ttprun.tensors.mirror_slots import Stored as Imaged
from ttprun.tensors.own_state import CELLS

Place = tuple[list[int], list[int]]  # by local rank: descriptors of its records, and of its tensors


class Memory(Slots):
    """Of each rank of a node, memory for its own state and for snapshots, and what is kept of the node before.

    snapshots   places for two; whoever decides on them closes them, as they may be on their way to the disk
    verified    by local rank, for what the collectives of a step have given to it; none if no step is verified
    """

    def __init__(self, node: Node) -> None:
        is_off = node.rungs.isdisjoint(("replace", "rewind", "persist")) or node.interval.is_never
        super().__init__(node, CELLS, "own-state", 2 * SLOTS, () if is_off else node.here)  # their records, too
        here, new = len(node.here), stored_states.new_memory
        self.snapshots: list[Place] = [(new("snapshot", here), new("snapshot", here)) for _ in range(SLOTS)]
        self.verified = new("verified", here if node.config.verified_every else 0)

    def close(self) -> None:
        """The ranks are gone: give the memory back."""
        super().close()
        for fd in self.verified:
            os.close(fd)

    def snapshots_of(self, local_rank: int) -> list[tuple[str, str]]:
        """Where a rank puts its part of each snapshot."""
        return [(path_of(records[local_rank]), path_of(tensors[local_rank])) for records, tensors in self.snapshots]

    def kept_of(self, rank: int) -> Stored:
        """What a rank whose step is verified has kept of itself, where there are no snapshots of all."""
        records, tensors = self.snapshots[0]
        here = self._node.process(rank).local_rank
        part = part_in(records[here])
        boundary, header = part["records"][-1][0], json.loads(part["header"])
        return Stored(boundary, "shared memory", (), header, (path_of(tensors[here]),), lambda _: part)

    # A rank's own state.

    def newest(self, rank: int) -> int | None:
        """The newest boundary that a process for this rank, which has none now, can go back to; None: there is none."""
        boundary = max(content.boundary for content in self.held_by(rank))
        if not boundary or not self._node.is_here(rank):
            return None
        try:
            is_there = self._is_in_recorder(rank, boundary) or (
                self._own_part(rank, boundary)["records"][-1][0] == boundary
            )
        except (OSError, ValueError, LookupError):
            return None
        return boundary if is_there else None

    def stored(self, rank: int, boundary: int) -> Stored | None:
        """What a rank has kept of a boundary; None if it does not keep that."""
        path = self.path_of(rank, boundary)
        if not path:
            return None
        return Stored(
            boundary,
            "shared memory",
            (),
            Imaged(path).described,
            (path,),
            lambda _: self._own_part(rank, boundary),
            is_in_recorder=self._is_in_recorder(rank, boundary),
        )

    def _own_part(self, rank: int, boundary: int) -> dict[str, Any]:
        number = slot_that_gives(self.held_by(rank), boundary, "state")
        return part_in(self._slots[rank][SLOTS:][number or 0])

    def _is_in_recorder(self, rank: int, boundary: int) -> bool:
        try:
            records_up_to(self._node.recorder_of(self._node.process(rank)), boundary)
        except KeyError:
            return False
        return True

    # Records.

    def fingerprint_of(self, rank: int, boundary: int) -> str:
        """A hash of what replicas have alike in a rank's record; "" if it has left no record of the boundary."""
        packed = self._node.recorder_of(self._node.process(rank)).read(boundary)
        if packed is None:
            return ""
        record = read_outline(packed[0])
        return hashlib.sha256(pack([record.weights, record.held, record.stepped])).hexdigest()

    def own_part(self, rank: int, boundary: int) -> bytes:
        """What a checkpoint has of a rank alone: of this node, or of the one before it, whose records this one keeps.

        boundary   of the checkpoint
        returns    msgpack of its records

        Raises KeyError if there is no record of the boundary.
        """
        node = self._node
        recorder = node.recorder_of(node.process(rank)) if node.is_here(rank) else self._kept_of(rank)
        packed: bytes = msgpack.packb(recorder.export(boundary))
        return packed

    def give(self, rank: int) -> str:
        """What this node keeps of a rank of the node before it; "" if that is nothing."""
        kept = self._kept_of(rank)
        if kept.newest == NO_BOUNDARY:
            return ""
        return base64.b64encode(zlib.compress(msgpack.packb(kept.export(kept.newest)), 1)).decode()

    def take(self, slot: Process, part: str) -> None:
        """Let a slot of this node be as the lost rank has left it.

        slot   which has been given to this node
        part   as `give` of the node that keeps the copies returns it, not ""

        Raises RecordTooLargeError.
        """
        recorder = self._node.new_recorder(slot)
        recorder.restore(msgpack.unpackb(zlib.decompress(base64.b64decode(part)), strict_map_key=False))
        newest = recorder.newest
        slot.had_torch = slot.is_lost = True
        slot.lost_boundary, slot.is_finished = newest, False
        for column in (Field.RECORDED, Field.APPLIED):
            self._node.board.set(slot.rank, column, newest)

    def _kept_of(self, rank: int) -> Recorder:
        node = self._node
        keeper = node.process((rank + len(node.here)) % node.world_size)
        return Recorder(keeper.copies_fd, node.slot_bytes)


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
