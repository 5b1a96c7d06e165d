"""The mirrors of ranks that hold what no other rank holds (`--buddy`): the agent's memory for them, and what is there.

A rank writes to its two slots in turns and says on the board what they hold (`ttprun.rank.weights.mirror`); a third
memory has what the collectives of its step have given to it. Begin with `Mirrors.source_of`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.processes import shared_memory
from ttprun.protocol.board import Field
from ttprun.protocol.mirrors import NOTHING, SLOTS, unpack

_CELLS = (Field.MIRROR_0, Field.MIRROR_1)


class Source(NamedTuple):
    """Where a replacement gets its lost rank's state.

    path     of the slot
    is_step  the last step has to be taken again, from what was there before it
    """

    path: str
    is_step: bool


class Mirrors:
    """Of each rank of a node, the memory for its mirror."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._slots: list[list[int]] = []

    @property
    def is_on(self) -> bool:
        """Whether ranks may keep mirrors."""
        config = self._node.config
        rungs = self._node.job.settings.rungs
        is_used = "replace" in rungs or ("persist" in rungs and "rewind" not in rungs)
        return config.buddy and not config.mindio and is_used and self.is_possible

    @property
    def is_possible(self) -> bool:
        """Whether all ranks are on this node."""
        return len(self._node.here) == len(self._node.slots)

    def begin_group(self) -> None:
        """All ranks are new, and what the old ones have mirrored is void."""
        for slots in self._slots:
            for fd in slots:
                os.close(fd)
        self._slots = (
            [shared_memory.new("mirror", SLOTS + 1) for _ in self._node.here] if self._node.config.buddy else []
        )
        for slot in self._node.slots:
            self.forget(slot)

    def paths_for(self, local_rank: int) -> list[str]:
        """Where a rank may keep its mirror."""
        return [shared_memory.path_of(fd) for fd in self._slots[local_rank]] if self.is_on else []

    def source_of(self, slot: RankSlot, boundary: int) -> Source | None:
        """Where the state that a rank had at a boundary is to be had; None: its mirror does not give it."""
        if not self._slots:
            return None
        ways = [unpack(self._node.board.get(slot.rank, cell)).gives(boundary) for cell in _CELLS]
        for way in ("state", "step"):
            if way in ways:
                return Source(shared_memory.path_of(self._slots[slot.local_rank][ways.index(way)]), way == "step")
        return None

    def forget(self, slot: RankSlot) -> None:
        """The rank goes back, or begins anew."""
        for cell in _CELLS:
            self._node.board.set(slot.rank, cell, NOTHING.pack())
