"""The record of a boundary: what a rank adds to it and what prevents it, how it is written and read back.

All else that is in it is gathered by capture/recording.py. Begin with `write_record`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ttprun.capture import recording, values
from ttprun.capture.effects.effects import Effects
from ttprun.capture.recording import Rehearsal
from ttprun.capture.records import recorder
from ttprun.capture.records.packing import BoundaryRecord
from ttprun.capture.records.recorder import Recorder, RecordTooLargeError
from ttprun.capture.values.changes import Clock
from ttprun.capture.values.trees import name_of_blob
from ttprun.groups.results import Results
from ttprun.introspect import costs as costs_of
from ttprun.introspect import fail_open, host_copies, model_tensors
from ttprun.introspect.current_rank import Rank
from ttprun.protocol.board import LEADER, Field
from ttprun.protocol.reason import Reason
from ttprun.tensors import open_boundaries, optimizer_registry, sharded
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.own_state import OwnState
from ttprun.tensors.replicated import PostStepWeights
from ttprun.tensors.shares import SnapshotPart


def describe(
    session: Rank,
    boundary: int,
    frame: FrameType,
    returned: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    has_looked: bool = False,
) -> tuple[BoundaryRecord, list[torch.Tensor], bool]:
    """The record of a boundary; arguments and result as in capture/recording.py.

    optimizer   about to make its step; None: it does not matter
    has_looked  whether what the optimizers update was asked for this boundary already
    """
    living = optimizer_registry.optimizers()
    stepped = optimizer_registry.newest() if has_looked else optimizer_registry.stepped(living)
    kept = session.parts[PostStepWeights]
    sample = b""
    if stepped.is_on_cpu:
        sample = stepped.sample(boundary)
        kept.compare(stepped, sample)
    else:

        def note(mark: bytes) -> None:
            nonlocal sample
            sample = mark

        kept.compare_later(stepped, boundary, note)
    of_step = session.parts[Results]
    if is_beside := of_step.has_begun_threads or bool(of_step.threads):
        of_step.gate.acquire()
        of_step.let_end()
    results = of_step.begin_step(boundary)

    def beside() -> recording.Beside:
        return recording.Beside(
            weights=b"" if stepped.is_sharded else sample,
            held=session.parts[Holdings].mark(stepped, optimizer, boundary),
            kept=kept.is_kept,
            rebuilt=optimizer_registry.rebuilt(),
            groups_made=dict(session.made.by_ranks),
            results=results,
            is_before_step=session.has_collective_steps,
        )

    number = None
    for at, other in enumerate(living):  # as optimizer_registry.number_of, without asking for them again
        if other is optimizer:
            number = at
            break
    steps = recording.Steps(living, stepped.storages, stepped.counts, number)
    try:
        return recording.describe(session, boundary, frame, steps, beside, returned)
    finally:
        if is_beside:
            of_step.gate.release()


def steps_now() -> recording.Steps:
    """The optimizers between two boundaries."""
    living = optimizer_registry.optimizers()
    stepped = optimizer_registry.stepped(living)
    return recording.Steps(living, stepped.storages, stepped.counts, None)


# Reasons in a record for which a replay would refuse it, found when it is written.
#
# They are reported at the first step, while the user can still change the script, rather than when a rank is lost.
# Begin with `look`.

_MOST = 3  # variables that are named
_OTHER_WAYS = {"mpi4py.MPI": "MPI", "horovod.torch": "Horovod", "byteps.torch": "BytePS"}  # of communication


def hindrance_of(record: BoundaryRecord, refused: list[Reason]) -> Reason:
    """Why no replay would reach this boundary; none if one may.

    refused   what the rehearsal has found of this record or an older one
    """
    if why_never := recorder.why_never(record):
        return why_never
    if record.boundary > 1 and record.entropy:  # draws of the setup do not matter
        return Reason(
            "random-draws",
            "the script draws from os.urandom in its steps, which gives other numbers each time: seed a generator",
        )
    return in_short(refused)


def in_short(refused: list[Reason]) -> Reason:
    """The first few of some reasons, as one."""
    more = f"; and {len(refused) - _MOST} more" if len(refused) > _MOST else ""
    return refused[0].within("; ".join(map(str, refused[:_MOST])) + more) if refused else Reason()


def look_without_group(session: Rank) -> None:
    """A step is taken without a group of ours: this rank trains alone, unless it communicates in another way."""
    if session.unprotected or session.framework is not None or session.world_size == 1:
        return
    why = _why_not_alone()
    if why:
        session.join()
        session.give_up_protection(why)
    else:
        session.part()


def _why_not_alone() -> Reason:
    """How this rank communicates without a group of ours; "" if it does not, as far as we know."""
    if dist.is_initialized():
        return Reason(
            "other-communication",
            "its process group was made by a reference to torch's function that is older than ttprun's hooks: call "
            "torch.distributed.init_process_group by that name",
        )
    if (module := next(filter(sys.modules.__contains__, _OTHER_WAYS), None)) is not None:
        return Reason(
            "other-communication",
            f"it communicates by {_OTHER_WAYS[module]}, which is not repaired: use torch.distributed",
        )
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and rpc.is_available() and rpc.api._is_current_rpc_agent_set():
        return Reason(
            "other-communication", "it communicates by torch.distributed.rpc, which is not repaired: use collectives"
        )
    return Reason()


def why_shards_unknown(optimizer: torch.optim.Optimizer) -> Reason:
    """Why the layout of this rank's shard of the weights or the optimizer's state is unknown; "" if it is known."""
    if any(map(model_tensors.is_gathered_in_place, optimizer_registry.parameters_of(optimizer))):
        return Reason(
            "sharding-unknown",
            "which part of FSDP1's parameters this rank holds is not known, as they are of a class of their own "
            "(DTensors): use torch's fully_shard (FSDP2)",
        )
    return Reason()


_SETTLING = 5  # records of a run, which are dear by nature: they make what later ones use again


@costs_of.measured(costs_of.RECORD)
def write_record(
    session: Rank,
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
        if why_not.text:
            session.give_up_protection(why_not)
        else:
            since = time.thread_time_ns()
            Clock.is_whole = session.options.keep_steps > 0 or session.parts[SnapshotPart].may_be_due(boundary)
            with values.room_to_walk():
                record, blobs, is_going_on = describe(session, boundary, frame, returned, optimizer, has_looked)
                is_open = is_open or is_going_on
                head = values.pack(record)
            hindrance = hindrance_of(record, session.parts[Rehearsal].refused)
            hindrance = hindrance or session.parts[Holdings].why_moved(optimizer_registry.newest())
            hindrance = hindrance or open_boundaries.why_none_is_closed(optimizer)
            session.note_hindrance(boundary, hindrance)
            if hindrance.text:  # the step that ends here would not come to the same
                session.parts[Recorder].evidence.clear()
            try:
                session.parts[Recorder].write(boundary, head, blobs)
            except RecordTooLargeError as error:
                raise RecordTooLargeError(f"{error}{_largest(record, blobs)}") from None
            session.parts[OwnState].is_apt = not hindrance.text and not is_open
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
    if session.unprotected.text:
        host_copies.forget()
    else:
        session.parts[Mirror].complete(session, boundary, optimizer)
    session.board.announce(session.rank, Field.RECORDED, boundary)
    if not session.unprotected.text:
        _rehearse(session, boundary)
    return not session.unprotected.text


def _largest(record: BoundaryRecord, blobs: Sequence[torch.Tensor]) -> str:
    """The end of a sentence: which variable takes the largest part of a record."""
    sizes = [blob.nbytes for blob in blobs]
    name = name_of_blob(record, sizes.index(max(sizes))) if sizes else ""
    return f" (its largest part is '{name}', {max(sizes) >> 10} KiB)" if name else ""


def _rehearse(session: Rank, boundary: int) -> None:
    """Before the wait for the other ranks: read back what was recorded, and report what a replay would lack."""
    rehearsal = session.parts[Rehearsal]
    read = rehearsal.go_on(lambda: not session.trains_alone and min(session.recorded) < boundary)
    if read:
        session.report_not_proved(rehearsal.unrecorded, is_unrecorded=True)
        if rehearsal.refused and not session.hindrance:
            session.note_hindrance(boundary, in_short(rehearsal.refused))
        session.row[Field.REHEARSED] = read


def _why_not_recorded(session: Rank, optimizer: torch.optim.Optimizer) -> Reason:
    """Why this rank's state could not be restored from records, other ranks and snapshots; "" if it could."""
    if not session.has_stepped and (why_not := why_shards_unknown(optimizer)):
        return why_not
    elsewhere = Effects.why_not_noted()
    if elsewhere:
        return elsewhere
    if session.has_stepped:
        return sharded.why_not_at_rest(optimizer) if optimizer_registry.are_sharded() else Reason()
    if not model_tensors.are_any(optimizer_registry.parameters()):
        return Reason()
    why_not = sharded.why_not_held(optimizer_registry.stepped_tensors())
    return why_not or sharded.why_not_at_rest(optimizer)
