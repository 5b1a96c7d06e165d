"""The state that a rank without others keeps in shared memory after a step; its next process resumes from it.

Two safetensors files take turns, so that one is complete at any moment; the board says which, and of which boundary. If
that is cheap it is done after each step, and no step can be lost; otherwise so rarely that it takes a small share of
the time. The records of the newest boundaries outlive the process anyway (`records/recorder.py`); if the next boundary
is not kept, those that a replay needs are exported before they are overwritten. Begin with `OwnState.keep`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from ttprun.introspect.fail_open import NotRepairableError
from ttprun.protocol import from_rank
from ttprun.protocol.board import EMPTY_SLOT, SLOTS, Board, Field, SlotContent, unpack_slot
from ttprun.protocol.reason import Reason
from ttprun.tensors.memory import Memory, free_bytes
from ttprun.tensors.mirror_slots import Layout, Slot, held_now
from ttprun.tensors.replicated import PostStepWeights

if TYPE_CHECKING:
    from ttprun.introspect.current_rank import Rank

CHEAP_S = 0.0005  # up to this, it is done after each step
_UNSURE = 10  # times as much, while too few have been measured: one may have been slow by chance
SHARE = 0.01  # of the time that it may take otherwise
CELLS = (Field.OWN_STATE, Field.OWN_STATE + 1)
_LOOKED_AT = 4  # measurements


class OwnState:
    """Keeps this rank's state.

    paths     of the agent's memory, for each slot, and for the records of each; none: nothing is kept
    why_off   why nothing is kept any more; "" if it is
    is_apt    a replay can reach the newest recorded boundary
    """

    def __init__(self, board: Board, rank: int, paths: Sequence[str], recorder: Any) -> None:
        self._recorder, self._board, self._rank = recorder, board, rank
        self._slots, self._records = [*map(Slot, paths[:SLOTS])], [*map(Memory, paths[SLOTS:])]
        self.why_off = "" if paths else "it is switched off"
        self.is_apt = True
        contents = [unpack_slot(board.get(rank, cell)) for cell in CELLS]
        self._kept, self._place = max((content.boundary, place) for place, content in enumerate(contents))
        self._are_records_kept = False
        self._at_s = 0.0
        self._took_s: deque[float] = deque(maxlen=_LOOKED_AT)
        self._records_s = 0.0  # exporting the records, too, took so long
        self._not_measured = 0  # copies: the first one in each place makes the layout and allocates the memory
        self._layout: Layout | None = None
        self._has_reported = False

    def keep(self, host: Rank, boundary: int) -> None:
        """The step to this boundary has ended: keep the state, if it is due. Raises nothing."""
        if self.why_off:
            return
        try:
            if self.is_apt and self._is_due():
                self._copy(boundary, host[PostStepWeights])
                if not self._has_reported and self._took_s:
                    self._has_reported = True
                    size = self._layout.size if self._layout else 0
                    host.channel.send(from_rank.OwnStateKept(boundary=boundary, bytes=size, took_s=self.cost_s))
            elif self._kept and not self._are_records_kept:
                self._keep_records()
        except Exception as error:  # e.g. no memory: training continues
            for place in range(SLOTS):
                self._note(place, EMPTY_SLOT)
            self.why_off = str(error) or repr(error)
            host.channel.send(from_rank.OwnStateKept(boundary=boundary, why_not=self.why_off))

    def _is_due(self) -> bool:
        cost_s, is_known = self.cost_s, len(self._took_s) == _LOOKED_AT
        is_cheap = cost_s <= (CHEAP_S if is_known else _UNSURE * CHEAP_S)
        return is_cheap or time.monotonic() - self._at_s >= (cost_s + self._records_s) / SHARE

    @property
    def cost_s(self) -> float:
        """CPU time of keeping the state: the least of the newest measurements."""
        return min(self._took_s, default=0.0)

    def _copy(self, boundary: int, kept: PostStepWeights) -> None:
        place, before = 1 - self._place, self._layout
        began_s = time.thread_time()
        layout, state = held_now(before, kept, 0)
        self._layout = layout
        if before is None or layout.size != before.size:
            self._not_measured = SLOTS
        if any(layout.places):
            said = "its parameters are sharded, and those are kept in snapshots only"
            raise NotRepairableError(Reason("sharding-unknown", said))
        if not self._kept:
            self._check_room(layout.size)
        self._note(place, EMPTY_SLOT)
        self._slots[place].lay_out(layout, state)
        self._slots[place].copy(state)
        self._note(place, SlotContent(boundary, has_state=True, has_step=False))
        self._kept, self._place, self._are_records_kept = boundary, place, False
        self._at_s = time.monotonic()
        if self._not_measured:
            self._not_measured -= 1
        else:
            self._took_s.append(time.thread_time() - began_s)

    def _note(self, place: int, content: SlotContent) -> None:
        self._board.set(self._rank, CELLS[place], content.pack())

    def _check_room(self, size_bytes: int) -> None:
        """Raises MemoryError if there is no room for two copies of each rank that has none yet."""
        rows = [any(self._board.get(row, cell) for cell in CELLS) for row in range(self._board.n_ranks)]
        needed, free = SLOTS * size_bytes * rows.count(False), free_bytes()
        if free is not None and needed > free:
            raise MemoryError(f"it takes {needed >> 20} MiB of shared memory, and only {free >> 20} MiB is free")

    def _keep_records(self) -> None:
        """The next boundary was not kept: export the records for a replay to this one before they are overwritten."""
        began_s = time.thread_time()
        # Output after this boundary is printed again: its length is not known yet.
        records = msgpack.packb(self._recorder.export(self._kept))
        self._records[self._place].fill(len(records), [memoryview(records)])
        self._are_records_kept = True
        self._records_s = time.thread_time() - began_s
