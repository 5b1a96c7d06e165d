"""Snapshots: at a boundary each rank copies its records and its share of the weights into memory that outlives it.

The agent asks for one by a number on the board. The first rank of the node notes the boundary at which it has seen
that, before it records this boundary; the others look there after the commit, when all have recorded it. So all take
the snapshot at the same boundary, and nobody waits for anybody. The copy is made in the step's own time, while nothing
else changes the tensors; what is left to do, the agent does in the background.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import msgpack

from ttprun.protocol.board import LEADER, ROW_FIELDS, Board, Field, Phase
from ttprun.protocol.snapshots import SnapshotSize, SnapshotTaken
from ttprun.rank.process.free_memory import free_bytes
from ttprun.rank.process.shared_memory import Memory
from ttprun.rank.weights import checkpoint_shards, replicated
from ttprun.rank.weights.open_boundaries import MOST_PUT_OFF

if TYPE_CHECKING:
    from ttprun.protocol.channel import Channel
    from ttprun.rank.session import Session

# Looked at in each step.
_ASKED = LEADER * ROW_FIELDS + Field.SNAPSHOT_ASKED
_TAKEN_AT = LEADER * ROW_FIELDS + Field.SNAPSHOT_AT


class Snapshots:
    """What a rank does for snapshots.

    shelves   for each place where a snapshot can be kept, the paths for this rank's records and for its share
    every     steps between two; 0: at the first boundary after one has been asked for
    owners    of parameters that the ranks do not hold alike, see `shares.Apart`; the agent's word
    """

    def __init__(self, board: Board, local_rank: int, shelves: Sequence[tuple[str, str]], every: int) -> None:
        self._board = board
        self._is_leader = local_rank == LEADER
        self._shelves = [(Memory(records), Memory(share)) for records, share in shelves]
        self._every = every
        self.owners: Mapping[str, Sequence[int]] = {}
        self._seen = board.get(LEADER, Field.SNAPSHOT_NUMBER)
        self._put_off = 0  # boundaries at which it was time, but which are open

    def tell_size(self, channel: Channel) -> None:
        """After the first step: about how much each rank will copy, so that the agent can have memory for it ready."""
        if self._is_leader:
            with contextlib.suppress(replicated.NotRepairableError):  # it will be said when a snapshot is taken
                channel.send(SnapshotSize(self._whole_bytes() // self._board.n_ranks))

    def agree(self, channel: Channel, boundary: int, is_open: bool) -> None:
        """The first rank, before the record of `boundary` is announced: say whether a snapshot is taken there.

        It is not if there is no memory for all ranks' parts; then the agent is told. At an open boundary it is put off
        to one of the next.
        """
        asked = self._board.cells[_ASKED]
        if asked == self._seen or (self._every and not self._put_off and boundary % self._every):
            return
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
        """Why a snapshot cannot be taken for want of memory, "" if it can. The ranks' shares are of about one size."""
        try:
            needed = self._whole_bytes()
            held = self._shelves[number % len(self._shelves)][1].held_bytes() * self._board.n_ranks
        except (replicated.NotRepairableError, OSError):
            return ""  # it will be said when the snapshot is taken
        free = free_bytes()
        if free is None or needed - held <= free:
            return ""
        return f"it takes {needed >> 20} MiB of shared memory, and less than that is free"

    def _whole_bytes(self) -> int:
        """About how much all ranks will copy together: of what is sharded, they hold about as much each."""
        parts = replicated.describe()[1]
        return sum(part.tensor.nbytes * (1 if part.chunk is None else self._board.n_ranks) for part in parts)

    def is_due(self, boundary: int) -> bool:
        """Whether all ranks take a snapshot of `boundary`; to be asked when all have recorded it."""
        return self._board.cells[_TAKEN_AT] == boundary

    def take(self, session: Session, boundary: int, frame: FrameType) -> None:
        """Copy what this rank keeps of the boundary that it has just come to, and tell the agent.

        A snapshot that cannot be taken costs nothing but itself: the reason is told.
        """
        started_s = time.monotonic()
        number = self._board.get(LEADER, Field.SNAPSHOT_NUMBER)
        session.touch(Phase.SAVING)
        try:
            for_records, for_share = self._shelves[number % len(self._shelves)]
            # What will be written after this boundary is not known now: whoever goes back to it writes it again.
            records = msgpack.packb(session.recorder.export(boundary) | {"lines": [0, 0]})
            for_records.fill(len(records), [memoryview(records)])
            apart = checkpoint_shards.Apart(self.owners, session.rank, range(session.world_size))
            share = checkpoint_shards.copy(for_share, session.local_rank, self._board.n_ranks, frame, apart)
            took_s = time.monotonic() - started_s
            taken = SnapshotTaken(number, boundary, "", share, records_bytes=len(records), took_s=took_s)
        except Exception as error:  # the script must go on
            taken = SnapshotTaken(number, boundary, why_not=f"rank {session.rank}: {error}")
        session.channel.send(taken)
