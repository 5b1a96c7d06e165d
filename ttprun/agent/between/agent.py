"""One agent: the node, and what is decided if it leads, on the ground that both share.

What a node's parts see of it is its `Node`, and the parts of what is decided see its `Lead`; only those between the two
see both.
"""

from __future__ import annotations

import os

from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.base.verdict import FirstFailure
from ttprun.agent.lead.lead import Lead, Row
from ttprun.agent.node.node import Node
from ttprun.agent.node.process import Process
from ttprun.capture.position import disk_cache
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.board import FINISHED, Board, Field


class Agent(Node, Lead):
    """That of one launcher.

    served   a store of this agent's, at which the ranks meet; it lasts longer than the group
    """

    def __init__(self, config: Config, run: RunDirectory, is_python: bool, job: recovery.Job) -> None:
        super().__init__(config, run, is_python, job.settings.rungs)
        self.job = job
        self.slots = []
        self.here = []
        self.loops = None
        self.board_fd = -1
        self._past = set()
        self.served: object = None

    def begin_group(self, ranks: list[tuple[int, int]], peers: Peers | None = None) -> None:
        """New ranks: `ranks` is (global rank, local rank) of each that is on this node.

        peers   the agents of the other nodes; None: there are none
        """
        self.peers = peers or Peers(ranks_per_node=len(ranks))
        self.loops = None if self.peers.address else disk_cache.files()
        for slot in self.here:
            slot.close()
        if self.board_fd >= 0:
            os.close(self.board_fd)
        self.board_fd, self._board = Board.create(self.world_size)
        self.here = [Process.create(rank, local, self.slot_bytes, bool(self.peers.address)) for rank, local in ranks]
        self.slots = [
            Row(rank, rank % self.peers.ranks_per_node, self._forward, self.is_here(rank))
            for rank in range(self.world_size)
        ]
        self.verdict = None
        self.is_concluded_elsewhere = False
        self.is_settled.clear()
        self.first_failure = FirstFailure()
        self.shared.clear()

    @property
    def has_killed_ones(self) -> bool:
        """Whether a signal has ended a process in a job that is done: its rank is away, or its script had ended."""
        return bool(self.job.away) or any(slot.handler.proc.poll() for slot in self.here)

    @property
    def has_finished(self) -> bool:
        """The scripts of all ranks of the job have come to their ends; their processes may still be there."""
        ended = (self.board.get(slot.rank, Field.ENDED) for slot in self.slots)
        recorded = (self.board.get(slot.rank, Field.RECORDED) for slot in self.slots)
        is_any_lost = any(slot.is_lost for slot in self.here) or any(slot.is_lost for slot in self.slots)
        is_any_lost = is_any_lost or self.first_failure.found is not None
        has_ended = all(is_over or at == FINISHED for is_over, at in zip(ended, recorded, strict=True))
        return bool(self.slots) and has_ended and not is_any_lost
