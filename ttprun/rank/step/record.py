"""The record of a boundary, written before the optimizer steps: what prevents it, how it is written and read back.

Begin with `write_record`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from ttprun.capture import values
from ttprun.capture.effects.effects import Effects
from ttprun.capture.recording import Rehearsal
from ttprun.capture.records.boundary_record import BoundaryRecord
from ttprun.capture.records.recorder import Recorder, RecordTooLargeError
from ttprun.capture.values.changes import Clock
from ttprun.capture.values.trees import name_of_blob
from ttprun.introspect import costs as costs_of
from ttprun.introspect import distributed_tensors, fail_open, host_copies
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.reason import Reason
from ttprun.rank.session import Session
from ttprun.rank.step import hindrances
from ttprun.rank.step.boundary import describe
from ttprun.tensors import open_boundaries, optimizer_registry, sharded
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.own_state import OwnState
from ttprun.tensors.snapshot_shares import SnapshotPart

_SETTLING = 5  # records of a run, which are dear by nature: they make what later ones use again


@costs_of.measured(costs_of.RECORD)
def write_record(
    session: Session,
    boundary: int,
    frame: FrameType,
    optimizer: torch.optim.Optimizer,
    returned: Any,
    has_looked: bool = False,
) -> bool:
    is_open = open_boundaries.look(optimizer)
    is_open = is_open or open_boundaries.is_in_backward()
    session.parts[OwnState].is_apt = False
    try:
        why_not = _why_not_recorded(session, optimizer)
        if why_not:
            session.give_up_protection(why_not)
        else:
            since = time.thread_time_ns()
            Clock.is_whole = session.parts[SnapshotPart].may_be_due(boundary)
            with values.room_to_walk():
                record, blobs, is_going_on = describe(session, boundary, frame, returned, optimizer, has_looked)
                is_open = is_open or is_going_on
                head = values.pack(record)
            hindrance = hindrances.look(record, session.parts[Rehearsal].refused)
            hindrance = hindrance or session.parts[Holdings].why_moved(optimizer_registry.newest())
            hindrance = hindrance or open_boundaries.why_none_is_closed(optimizer)
            session.note_hindrance(boundary, hindrance)
            if hindrance:  # the step that ends here would not come to the same
                session.parts[Recorder].evidence.clear()
            try:
                session.parts[Recorder].write(boundary, head, blobs)
            except RecordTooLargeError as error:
                raise RecordTooLargeError(f"{error}{_largest(record, blobs)}") from None
            session.parts[OwnState].is_apt = not hindrance and not is_open
            ceiling = session.costs.ceiling
            budget = session.options.overhead_budget if Clock.records > _SETTLING else 0
            excess = ceiling.note(time.thread_time_ns() - since, budget)
            if excess is not None and ceiling.prices:
                values.leave_dearest(ceiling.prices, *excess)
                ceiling.prices = None
            session.report_not_proved(record.named)
            session.parts[Rehearsal].note(session.parts[Recorder], record, head, session.options.is_strict)
            if boundary == 1:
                session.parts[Recorder].write_first(boundary, head, blobs)
    except RecordTooLargeError as error:
        session.give_up_protection(Reason("record-full", str(error)))
    except Exception as error:  # fail open
        fail_open.raise_if_meant(error)
        session.give_up_protection(
            Reason("state-unreadable", f"the state of boundary {boundary} cannot be recorded: {error!r}")
        )
    if session.local_rank == LEADER and not session.trains_alone:
        session.parts[SnapshotPart].agree(session.channel, boundary, is_open)
    if is_open and not session.trains_alone:
        open_boundaries.come_to(session, boundary)
    if session.unprotected:
        host_copies.forget()
    else:
        session.parts[Mirror].complete(session, boundary, optimizer)
    session.board.announce(session.rank, Field.RECORDED, boundary)
    if not session.unprotected:
        _rehearse(session, boundary)
    return not session.unprotected


def _largest(record: BoundaryRecord, blobs: Sequence[torch.Tensor]) -> str:
    """The end of a sentence: which variable takes the largest part of a record."""
    sizes = [blob.nbytes for blob in blobs]
    name = name_of_blob(record, sizes.index(max(sizes))) if sizes else ""
    return f" (its largest part is '{name}', {max(sizes) >> 10} KiB)" if name else ""


def _rehearse(session: Session, boundary: int) -> None:
    """Before the wait for the other ranks: read back what was recorded, and report what a replay would lack."""
    rehearsal = session.parts[Rehearsal]
    read = rehearsal.go_on(lambda: not session.trains_alone and min(session.recorded) < boundary)
    if read:
        session.report_unrecorded(rehearsal.unrecorded)
        if rehearsal.refused and not session.hindrance:
            session.note_hindrance(boundary, hindrances.in_short(rehearsal.refused))
        session.row[Field.REHEARSED] = read


def _why_not_recorded(session: Session, optimizer: torch.optim.Optimizer) -> Reason:
    """Why this rank's state could not be restored from records, other ranks and snapshots; "" if it could."""
    if not session.has_stepped and (why_not := hindrances.why_shards_unknown(optimizer)):
        return why_not
    elsewhere = Effects.why_not_noted()
    if elsewhere:
        return elsewhere
    if session.has_stepped:
        return sharded.why_not_at_rest(optimizer) if optimizer_registry.are_sharded() else Reason()
    if not distributed_tensors.are_any(optimizer_registry.parameters()):
        return Reason()
    why_not = sharded.why_not_held(optimizer_registry.stepped_tensors())
    return why_not or sharded.why_not_at_rest(optimizer)
