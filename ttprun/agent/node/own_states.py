"""What ranks that are alone keep of themselves: the agent's memory for it, and what can be had of it.

A rank writes to its two places in turns and says on the board which is newest (`ttprun.tensors.own_state`). Its
records of the newest boundaries are in its recorder anyway; those of an older one it has written out beside its
tensors. Begin with `OwnStates.newest`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from msgspec.structs import asdict

from ttprun import recovery
from ttprun.agent.lead.row import Row
from ttprun.agent.lead.schedules import SnapshotTimes
from ttprun.agent.node import stored_states
from ttprun.agent.node.node import Node
from ttprun.agent.node.process import Process
from ttprun.agent.node.stored_states import Stored, unpack
from ttprun.capture.records.recorder import records_up_to
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field
from ttprun.tensors.own_state import CHEAP_S, HEADER, SHARE, split

logger = logging.getLogger("ttprun")

_PLACES = 2
_LENGTH_BYTES = 8  # of the header of a file of safetensors


class OwnStates:
    """Of each rank of a node, the memory for its own state: records and tensors, in two places."""

    def __init__(self, node: Node, times: SnapshotTimes) -> None:
        self._node = node
        self._times = times
        self._has_reported = False
        self._places: list[list[tuple[int, int]]] = [
            list(
                zip(
                    stored_states.new_memory("own-state", _PLACES),
                    stored_states.new_memory("own-state", _PLACES),
                    strict=True,
                )
            )
            for _ in node.here
        ]

    def close(self) -> None:
        """The ranks are gone: give the memory back."""
        for places in self._places:
            for pair in places:
                for fd in pair:
                    os.close(fd)

    def paths_for(self, local_rank: int) -> list[tuple[str, str]]:
        """Where a rank may keep its own state; nowhere, if nobody would go back to it."""
        node = self._node
        if node.job.settings.rungs.isdisjoint(("replace", "rewind", "persist")) or self._times.is_never:
            return []
        return [
            (stored_states.path_of(records), stored_states.path_of(tensors))
            for records, tensors in self._places[local_rank]
        ]

    def note(self, slot: Row, message: from_rank.OwnStateKept) -> None:
        """A rank has kept its state for the first time, or cannot: say what its loss will cost, once."""
        node, why_not = self._node, message.why_not
        node.log("own_state", rank=slot.rank, **asdict(message))
        if self._has_reported and not why_not:
            return
        self._has_reported = True
        every_s = None if why_not else (0.0 if message.took_s <= CHEAP_S else message.took_s / SHARE)
        cost = recovery.cost_of_a_loss_alone(node.job, slot.rank, every_s)
        if why_not:
            logger.warning("rank %d cannot keep its own state: %s. If it is lost, %s", slot.rank, why_not, cost)
        else:
            level = logging.WARNING if every_s else logging.INFO
            kept = f"a rank that is alone keeps its state ({message.bytes / (1 << 20):.1f} MiB)"
            logger.log(level, "%s: if rank %d is lost, %s", kept, slot.rank, cost)

    def reached(self, rank: int, recorded: int) -> int:
        """How many steps a rank that is lost had completed; one that is not alone is known by what it had recorded."""
        node = self._node
        is_alone = recovery.is_alone(node.job, rank)
        return node.board.get(rank, Field.APPLIED) if is_alone else recorded

    def report_what_is_left(self, lost: int) -> None:
        """A rank that is lost, and whose process does nothing more: let the machine know what it can go back to."""
        node = self._node
        if not recovery.is_alone(node.job, lost):
            return
        boundary, rank = self.newest(lost), None if len(node.slots) == 1 else lost
        if boundary is None and rank is None:
            return  # there may be a snapshot
        node.advance(recovery.SnapshotTaken(at_s=time.monotonic(), boundary=boundary, rank=rank))

    def newest(self, rank: int) -> int | None:
        """The newest boundary that a process for this rank, which has none now, can go back to; None: there is none."""
        boundary, place = split(self._node.board.get(rank, Field.OWN_STATE))
        if not boundary or not self._node.is_here(rank):
            return None
        slot = self._node.process(rank)
        try:
            is_there = self._is_in_recorder(slot, boundary) or self._records(slot, place)["records"][-1][0] == boundary
        except (OSError, ValueError, LookupError):
            return None
        return boundary if is_there else None

    def stored(self, rank: int, boundary: int) -> Stored | None:
        """What a rank has kept of a boundary; None if it is not the newest that it keeps."""
        newest, place = split(self._node.board.get(rank, Field.OWN_STATE))
        if newest != boundary:
            return None
        slot = self._node.process(rank)
        tensors = self._places[slot.local_rank][place][1]
        is_recorded = self._is_in_recorder(slot, boundary)
        return Stored(
            boundary,
            "shared memory",
            (),
            _header_of(tensors),
            (stored_states.path_of(tensors),),
            lambda _: self._records(slot, place),
            is_in_recorder=is_recorded,
        )

    def forget(self, rank: int) -> None:
        """The rank begins anew."""
        self._node.board.set(rank, Field.OWN_STATE, 0)

    def _is_in_recorder(self, slot: Process, boundary: int) -> bool:
        try:
            records_up_to(self._node.recorder_of(slot), boundary)
        except KeyError:
            return False
        return True

    def _records(self, slot: Process, place: int) -> dict[str, Any]:
        fd = self._places[slot.local_rank][place][0]
        return unpack(os.pread(fd, os.fstat(fd).st_size, 0))


def _header_of(fd: int) -> list[Any]:
    """What the tensors of a file are, as `ttprun.tensors.replicated` describes them."""
    size = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    stored = json.loads(os.pread(fd, size, _LENGTH_BYTES))
    header: list[Any] = json.loads(stored["__metadata__"][HEADER])
    return header
