"""Which of a rank's records a replay needs, and why some cannot be replayed.

Used by the rank that replays, and before that by the agent, so that it plans no replay that the rank would refuse.
Begin with `records_up_to`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttprun.capture.records.boundary_record import BoundaryRecord, Record
from ttprun.capture.records.recorder import SLOTS, Recorder


def read_record(recorder: Recorder, number: int) -> Record:
    """A boundary's record. Raises KeyError if the recorder does not hold it, MalformedRecordError."""
    parts = recorder.read(number)
    if parts is None:
        raise KeyError(number)
    return Record.of(*parts)


def records_up_to(recorder: Recorder, number: int) -> list[Record]:
    """The records from the boundary at which a replay begins to the one that it must reach. Raises KeyError."""
    target = read_record(recorder, number)
    before = _record_to_begin_at(recorder, target)
    first = before.fields.boundary if before else number
    return [read_record(recorder, earlier) for earlier in range(first, number)] + [target]


def _record_to_begin_at(recorder: Recorder, target: Record) -> Record | None:
    """The newest earlier boundary of the same optimizer at the same place, else the one before; None at the first one.

    A run's first record after a change of its ranks is `is_straight`: a replay goes directly to it, and nothing earlier
    is used. A replay cannot begin at a boundary after which batches of an ended loader are trained on: they are lost.
    """
    number = target.fields.boundary
    if target.fields.is_straight:
        return target
    others = []
    for earlier in range(number - 1, max(0, number - SLOTS + 1), -1):
        record = read_record(recorder, earlier)
        if not record.fields.is_draining:
            if (record.fields.place, record.fields.stepping) == (target.fields.place, target.fields.stepping):
                return record
            others.append(record)
        if record.fields.is_straight:
            break
    if others:
        return others[0]
    return read_record(recorder, number - 1) if number > 1 else None


def why_never(record: BoundaryRecord) -> str:
    """Why no replay can reach the place of a record; "" if one may."""
    return record.unfollowed


def why_other_numbers(record: BoundaryRecord) -> str:
    """Why the step before a record cannot be run again; "" if it can."""
    return (
        "the script draws from os.urandom in its steps, which gives other numbers each time" if record.entropy else ""
    )


def why_not(records: Sequence[Record]) -> str:
    """Why a replay over these records would be refused; "" if they contain no reason."""
    fields = [record.fields for record in records]
    first, target = fields[0], fields[-1]
    reasons = [why_never(first), why_never(target)]
    reasons += [why_other_numbers(record) for record in fields if record is not first or record is target]
    return next(filter(None, reasons), "")
