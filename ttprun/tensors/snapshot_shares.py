"""Snapshots: at a boundary each rank copies its records and its share of the weights into memory that outlives it.

The agent requests one by a number on the board. The first rank of the node writes the boundary there before it records
this boundary; the others read it after the commit, when all have recorded it. So all take the snapshot at the same
boundary without waiting. The copy is made on the main thread, while nothing else changes the tensors; the agent does
the rest in the background.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import msgpack

from ttprun.introspect import fail_open
from ttprun.protocol.board import LEADER, ROW_FIELDS, Board, Field, Phase
from ttprun.protocol.reason import pointer
from ttprun.protocol.snapshot_messages import SnapshotSize, SnapshotTaken
from ttprun.tensors import checkpoint_shards, replicated
from ttprun.tensors.memory import Memory, free_bytes
from ttprun.tensors.open_boundaries import MOST_PUT_OFF

if TYPE_CHECKING:
    from ttprun.protocol.channel import Channel
    from ttprun.tensors.host import Exporting, Host

# Read in each step.
_ASKED = LEADER * ROW_FIELDS + Field.SNAPSHOT_ASKED
_TAKEN_AT = LEADER * ROW_FIELDS + Field.SNAPSHOT_AT
_QUIESCED = LEADER * ROW_FIELDS + Field.QUIESCE_ASKED


class SnapshotPart:
    """A rank's part in snapshots.

    buffers   for each place where a snapshot can be kept, the paths for this rank's records and for its share
    every     steps between two; 0: at the first boundary after a request
    owners    of parameters that differ between ranks, see `checkpoint_shards.Differing`; set by the agent
    """

    def __init__(
        self,
        board: Board,
        local_rank: int,
        buffers: Sequence[tuple[str, str]],
        every: int,
        recorder: Exporting,
    ) -> None:
        self._recorder = recorder
        self._board = board
        self._is_leader = local_rank == LEADER
        self._buffers = [(Memory(records), Memory(share)) for records, share in buffers]
        self._every = every
        self.owners: Mapping[str, Sequence[int]] = {}
        self._seen = board.get(LEADER, Field.SNAPSHOT_NUMBER)
        self._put_off = 0  # boundaries at which it was due, and not taken
        self._newest = (0, 0)  # the newest request that was met, and the boundary then

    def report_size(self, channel: Channel) -> None:
        """After the first step: an estimate of each rank's copy, so that the agent can prepare the memory."""
        if self._is_leader:
            with contextlib.suppress(fail_open.NotRepairableError):  # reported when a snapshot is taken
                channel.send(SnapshotSize(self._whole_bytes() // self._board.n_ranks))

    def agree(self, channel: Channel, boundary: int, is_open: bool) -> None:
        """The first rank, before the record of `boundary` is announced: decide whether a snapshot is taken there.

        is_open   no run could resume from this boundary

        It is postponed, at most MOST_PUT_OFF times, if the boundary is open, or if nothing follows it that would show
        whether a replay of it is right.
        Without memory for all ranks' parts it is not taken, which is reported.
        """
        asked = self._board.cells[_ASKED]
        if asked == self._seen or (self._every and not self._put_off and boundary % self._every):
            return
        is_open = is_open or not self._recorder.evidence.is_likely(boundary)
        if is_open and self._put_off < MOST_PUT_OFF:
            self._put_off += 1
            return
        self._put_off = 0
        self._seen = asked
        why_not = self._why_no_room(asked)
        if why_not:
            channel.send(SnapshotTaken(asked, boundary, why_not))
            return
        self._board.set(LEADER, Field.SNAPSHOT_NUMBER, asked)
        self._board.set(LEADER, Field.SNAPSHOT_AT, boundary)

    def _why_no_room(self, number: int) -> str:
        """Why there is no memory for a snapshot, "" if there is. The ranks' shares have about the same size."""
        try:
            needed = self._whole_bytes()
            held_bytes = self._buffers[number % len(self._buffers)][1].held_bytes() * self._board.n_ranks
        except (fail_open.NotRepairableError, OSError):
            return ""  # reported when the snapshot is taken
        free = free_bytes()
        if free is None or needed - held_bytes <= free:
            return ""
        what = f"{needed >> 20} MiB of shared memory, and only {free >> 20} MiB more is free"
        return f"it takes {what}{pointer('memory-full')}"

    def _whole_bytes(self) -> int:
        """An estimate of the bytes that all ranks copy together; shards have about the same size in each."""
        parts = replicated.describe()[1]
        return sum(part.tensor.nbytes * (1 if part.place is None else self._board.n_ranks) for part in parts)

    def may_be_due(self, boundary: int) -> bool:
        """Whether the record of this boundary may become part of a snapshot, or of what the job resumes from.

        Asked of each boundary, before its record. A request counts for as long as it can be put off.
        """
        cells = self._board.cells
        if cells[_ASKED] != self._newest[0]:
            since = boundary if not self._every else -(-boundary // self._every) * self._every
            self._newest = cells[_ASKED], since
        return cells[_QUIESCED] != 0 or 0 <= boundary - self._newest[1] <= MOST_PUT_OFF

    def is_due(self, boundary: int) -> bool:
        """Whether all ranks take a snapshot of `boundary`; valid when all have recorded it."""
        return self._board.cells[_TAKEN_AT] == boundary

    def take(self, session: Host, boundary: int, frame: FrameType) -> None:
        """Copy this rank's part of the boundary that it has just reached, and report to the agent. Raises nothing.

        frame   innermost of the main thread's: its variables name the models
        """
        started_s = time.monotonic()
        number = self._board.get(LEADER, Field.SNAPSHOT_NUMBER)
        session.touch(Phase.SAVING)
        try:
            place = number % len(self._buffers)
            for_records, for_share = self._buffers[place]
            self._recorder.evidence.keep(boundary, place)
            # Output after this boundary is not known yet: a rewind prints it again.
            records = msgpack.packb(self._recorder.export(boundary))
            for_records.fill(len(records), [memoryview(records)])
            differing = checkpoint_shards.Differing(self.owners, session.rank, range(session.world_size))
            share = checkpoint_shards.copy(for_share, session.local_rank, self._board.n_ranks, frame, differing)
            took_s = time.monotonic() - started_s
            taken = SnapshotTaken(number, boundary, "", share, records_bytes=len(records), took_s=took_s)
        except Exception as error:  # training continues
            taken = SnapshotTaken(number, boundary, why_not=f"rank {session.rank}: {error}")
        session.channel.send(taken)
