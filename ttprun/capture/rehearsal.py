"""The rehearsal: whether this rank's records could be restored, found out before the rank is lost.

The first records of a process, and each later one with other variables, are read back from shared memory, as a
replacement would read them, and each node is looked at: nothing of the script's own is touched. It is done where the
rank waits for the others' records anyhow, and beyond that takes SHARE of the time at most: a large record is read over
several steps. Begin with `Rehearsal.note`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ttprun.capture import values
from ttprun.capture.records.boundary_record import BoundaryRecord, read_head
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import fail_open

SHARE = 0.005  # of the time since the process has begun
_FIRST = 2  # records: in the second step optimizers have their state, and variables of the first one are set
_AGAIN = 64  # boundaries: a variable may be of another kind by then
_AT_ONCE = 64  # nodes between two looks at the clock


class Rehearsal:
    """Of one rank, in one process.

    refused      why a replacement would be refused in any case, a sentence a part; known from the newest rehearsal
    unrecorded   the same of what refuses one only if its rank has left no loss of its step
    """

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.unrecorded: list[str] = []
        self._began_s = time.monotonic()
        self._used_s = 0.0
        self._count = 0
        self._names: list[list[Any]] = []
        self._is_due = False
        self._at = 0  # the boundary whose record is being read
        self._reading: Iterator[None] | None = None

    def note(self, recorder: Recorder, record: BoundaryRecord, head: bytes, is_strict: bool) -> None:
        """A record has been written: begin to read it as a replacement would, if that is due.

        recorder    holds the record
        record      its fields
        head        its packed part
        is_strict   --proof strict: what is not recorded refuses a replacement
        """
        names = [[*scope, scope.get(values.FIXED)] for scope in (*record.variables, *record.modules.values())]
        boundary = record.boundary
        self._is_due |= self._count < _FIRST or names != self._names
        if is_strict or boundary % _AGAIN == 0:
            self._is_due |= bool(self.refused or self.unrecorded) or values.MARK_OF_REFUSED in head
        self._names = names
        if self._is_due and self._reading is None:
            self._is_due, self._at = False, boundary
            self._count += 1
            self._reading = self._read(recorder.read_head(boundary), is_strict)

    def go_on(self, may_wait: Callable[[], bool]) -> int:
        """Read on while the rank waits, or has time left. Returns the boundary whose record has been read to its end.

        may_wait   whether the rank has nothing else to do

        Returns 0 if none has.
        """
        if self._reading is None:
            return 0
        began_s = now_s = time.monotonic()
        try:
            while self._used_s + now_s - began_s < SHARE * (now_s - self._began_s) or may_wait():
                for _ in range(_AT_ONCE):
                    next(self._reading)
                now_s = time.monotonic()
        except StopIteration:
            self._reading = None
            return self._at
        finally:
            self._used_s += time.monotonic() - began_s
        return 0

    def _read(self, head: bytes, is_strict: bool) -> Iterator[None]:
        refused: list[str] = []
        unrecorded: list[str] = []
        try:
            for sentence, is_needed in values.refusals(read_head(head)):
                if sentence:
                    (refused if is_needed or is_strict else unrecorded).append(sentence)
                yield
        except Exception as error:
            fail_open.raise_if_meant(error)
            refused.append(f"the record of boundary {self._at} cannot be read back: {error!r}")
        self.refused = list(dict.fromkeys(refused))
        self.unrecorded = list(dict.fromkeys(unrecorded))
