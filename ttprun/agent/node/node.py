"""The ranks of one node: their processes, and what they leave in memory. Read the attributes of `Node` first."""

from __future__ import annotations

import time

from ttprun.agent.base.ground import Ground
from ttprun.agent.node.process import Process
from ttprun.capture.records.boundary_record import Outline, read_outline
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import children
from ttprun.protocol.board import Field

_LOOK_AGAIN_S = 0.05


class Node(Ground):
    """What this machine does for its ranks, whichever agent leads.

    here       the processes of this node's ranks, by local rank
    loops      files in which earlier runs have met a training loop; None: on several nodes they may differ
    board_fd   of the board; -1 before the first group
    """

    here: list[Process]
    loops: list[str] | None
    board_fd: int
    _past: set[int]  # pids of ranks that have ended

    def process(self, rank: int) -> Process:
        """That of a rank of this node. Raises LookupError if the rank is on another one."""
        if not self.is_here(rank):
            raise LookupError(f"rank {rank} is on {self.peers.name_of(self.peers.node_of(rank))}")
        return self.here[rank - self.here[0].rank]

    def note_generation(self, generation: int) -> None:
        """The agent that leads, if it is another one, has begun another generation."""
        if self.peers.is_follower:
            self.generation = generation

    def remove_left_files(self, pid: int = 0, limit_s: float = 0.0) -> None:
        """Remove what dead DataLoader workers of this run have left in shared memory.

        pid      of a rank that has just ended, 0 if none has
        limit_s  to wait for those that are about to die
        """
        self._past.add(pid)
        ends_s = time.monotonic() + limit_s
        while True:
            removed, is_more = children.remove_left_files(self.run.path, self._past - {0})
            if removed:
                self.log("left_files_removed", names=removed)
            if not is_more or time.monotonic() >= ends_s:
                return
            time.sleep(_LOOK_AGAIN_S)

    def go_back(self, slot: Process, boundary: int) -> None:
        """What a rank has done beyond a boundary is void; it has no process now."""
        slot.go_back_to(boundary)
        self.set_back(slot.rank, boundary)

    def move_master(self, where: str) -> None:
        """Processes that are started from now on find their store elsewhere: "address port"."""
        self.peers.master = where
        address, port = where.split()
        for slot in self.here:
            slot.handler.start["env"] |= {"MASTER_ADDR": address, "MASTER_PORT": port}

    # What the ranks have left in shared memory, dead or alive.

    def void_beyond(self, boundary: int) -> None:
        """What lost ranks have recorded beyond a boundary is void: survivors wait for their replacements' records."""
        for slot in self.here:
            if slot.void_beyond(boundary):
                self.board.set(slot.rank, Field.RECORDED, boundary)

    def recorder_of(self, slot: Process) -> Recorder:
        """A rank's records."""
        return Recorder(slot.record_fd, self.slot_bytes)

    def copies_in(self, slot: Process) -> Recorder:
        """The records of a rank of another node, as far as this one keeps a copy."""
        return Recorder(slot.copies_fd, self.slot_bytes)

    def new_recorder(self, slot: Process) -> Recorder:
        """Void a rank's records, and give it room for others."""
        slot.renew_records(self.slot_bytes)
        return self.recorder_of(slot)

    def recorded(self, slot: Process, boundary: int) -> Outline | None:
        """Of a rank's record of a boundary, whoever wrote it; None if there is none."""
        record = self.recorder_of(slot).read(boundary)
        return None if record is None else read_outline(record[0])

    @property
    def slot_bytes(self) -> int:
        """Room for the records of one rank."""
        return self.config.record_limit_mib << 20
