"""What is written at a boundary: the state of the script, gathered into a record.

The fields are those of records/packing.py. Begin with `describe`.

The first records of a process, and each later one with other variables, are read back from shared memory, as a
replacement would read them (`Rehearsal`), and each node is looked at, so that a rank knows before it is lost whether it
could be restored: nothing of the script's own is touched. It is done where the rank waits for the others' records
anyhow, and beyond that takes SHARE of the time at most: a large record is read over several steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import msgspec
import torch

from ttprun.capture import values
from ttprun.capture.data import loaders
from ttprun.capture.effects import file_answers, origins, script_files
from ttprun.capture.position import call_site, iterables, loops, made_inside
from ttprun.capture.records.packing import BoundaryRecord, PassRecord, ScriptState, read_head, read_state
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import fail_open, host_copies, random_state
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.tensor_bytes import bytes_of, plain_together
from ttprun.protocol.reason import Reason


class Steps(msgspec.Struct, frozen=True, gc=False):
    """The script's optimizers at a boundary; a Struct, as it is made at each step.

    living     in the order in which they were made
    storages   data pointer of each tensor that they update -> its index among these
    counts     of each optimizer: numbers of its parameters and of its state tensors
    number     of the one that is about to step; None: it is not known
    """

    living: Sequence[torch.optim.Optimizer]
    storages: dict[int, int]
    counts: list[list[int]]
    number: int | None


class Beside(msgspec.Struct, frozen=True, gc=False):
    """What others add to a record: its fields of the same names (records/packing.py)."""

    weights: bytes
    held: bytes
    kept: bool
    rebuilt: list[bool]
    groups_made: dict[str, int]
    results: list[tuple[int, str, list[bytes]]]
    is_before_step: bool


_MOST_BYTES_OF_A_START = 1 << 20  # of a pass: they are written at each boundary
NOTHING_BESIDE = Beside(b"", b"", False, [], {}, [], False)


def describe(
    host: Rank,
    boundary: int,
    frame: FrameType,
    steps: Steps,
    beside: Callable[[], Beside] = lambda: NOTHING_BESIDE,
    returned: Any = None,
) -> tuple[BoundaryRecord, list[torch.Tensor], bool]:
    """The record of a boundary: (plain part, tensors to write after it, whether another thread still computes a part).

    frame      as for `look`, before the step
    beside     called once all that waits for the CPU (host_copies.py) has been copied
    returned   the result of the step's closure
    """
    whereabouts = call_site.look(frame)
    around = whereabouts.around
    loops.note_steps(around, whereabouts.unfollowed)
    is_draining = loaders.note_boundary()
    values.begin_boundary()
    snapshot = values.Snapshot(steps.storages, iterables.followed(around), prices=host.costs.ceiling.prices)
    variables = [
        snapshot.variables(scope, (id(code), depth), is_lasting=code.co_name == "<module>")
        for depth, (code, scope) in enumerate(zip(whereabouts.codes, whereabouts.scopes, strict=True))
    ]
    active = [[snapshot.loop(loop) for loop in of_frame] for of_frame in whereabouts.active]
    modules = {
        name: snapshot.variables(vars(module), name, is_lasting=True) for name, module in _other_modules(whereabouts)
    }
    optimizers = [snapshot.node(optimizer, 0) for optimizer in steps.living]
    returned = snapshot.node(returned, 0)
    named = file_answers.not_proved() + loaders.not_proved()
    if snapshot.not_proved:
        names = ["" if code.co_name == "<module>" else code.co_qualname for code in whereabouts.codes]
        scopes = dict(zip(names, variables, strict=True)) | modules
        scopes["optimizers"] = dict(zip(map(str, range(len(optimizers))), optimizers, strict=True))
        named = values.names_not_proved(snapshot, scopes) + named
    blobs, are_here = snapshot.blobs, not host_copies.waiting
    for blob in blobs:
        are_here = are_here and blob.is_cpu
    if not are_here:
        blobs = host_copies.take(blobs)
    others = beside()
    skipped = "" if whereabouts.why_not else made_inside.why_skipped(boundary, whereabouts)
    record = BoundaryRecord(
        boundary=boundary,
        place=whereabouts.place,
        dead=whereabouts.dead,
        unfollowed=whereabouts.why_not or skipped,
        unfollowed_kind="made-inside-the-loop" if skipped else "loop-not-followed",
        variables=variables,
        loops=active,
        generator_loops=snapshot.generator_loops,
        modules=modules,
        optimizers=optimizers,
        returned=returned,
        stepped=steps.counts,
        rng=random_state.capture(),
        loaders=loaders.records(),
        loaders_made=loaders.made(),
        groups_made=others.groups_made,
        results=others.results,
        rebuilt=others.rebuilt,
        files=script_files.positions(),
        at_ns=script_files.clock_ns(),
        has_steps=loops.keys_with_steps,
        weights=others.weights,
        held=others.held,
        kept=others.kept,
        entropy=origins.drawn_since_last_asked(),
        blobs=[blob.nbytes for blob in blobs],
        named=named,
        is_draining=is_draining,
        stepping=steps.number,
        is_before_step=others.is_before_step,
        passes=made_inside.starts(whereabouts) if loops.passes else [],
    )
    return record, blobs, any(map(values.is_awaited, snapshot.computed))


def _other_modules(whereabouts: call_site.Whereabouts) -> Iterator[tuple[str, ModuleType]]:
    """The user's modules whose variables are not those of a frame on the stack."""
    on_stack = set(map(id, whereabouts.scopes))
    return ((name, module) for name, module in script_files.user_modules() if id(module.__dict__) not in on_stack)


def look(frame: FrameType, steps: Steps) -> values.Tree:
    """The user's variables between two boundaries, in the form of a record; changes no state.

    frame   the innermost frame of the script, or one called by it
    """
    whereabouts = call_site.look(frame)
    snapshot = values.Snapshot(steps.storages, iterables.followed(whereabouts.around))
    state = ScriptState(
        place=whereabouts.place,
        variables=[snapshot.variables(scope) for scope in whereabouts.scopes],
        loops=[],
        modules={name: snapshot.variables(vars(module)) for name, module in _other_modules(whereabouts)},
        optimizers=[],
        stepped=steps.counts,
        blobs=[blob.nbytes for blob in snapshot.blobs],
        dead=whereabouts.dead,
    )
    return tree_of(values.pack(state), plain_together(snapshot.blobs))


def note_pass(steps: Callable[[], Steps], key: str, frame: FrameType) -> None:
    """Note the state of the script at the start of a loop's pass, if a replay may need it.

    steps   asked only then
    key     of the loop
    frame   runs the loop
    """
    if not made_inside.has_to_note(key):
        return
    tree = look(frame, steps())
    packed, blobs = values.pack(tree.fields), list(map(bytes, tree.blobs))
    size = len(packed) + sum(map(len, blobs))
    loops.passes[key] = PassRecord(site=key, state=packed, blobs=blobs, rng=random_state.capture())
    if size > _MOST_BYTES_OF_A_START:  # it would go into each record
        why = f"the script's variables where that iteration begins are too large to be kept ({size >> 10} KiB)"
        loops.passes[key] = why


def tree_of(packed: bytes, tensors: list[torch.Tensor]) -> values.Tree:
    """A record as another process would read it.

    packed    its plain part
    tensors   its blobs, dense, any dtype, shape and device
    """
    return values.Tree(read_state(packed), [memoryview(bytes(bytes_of(tensor))) for tensor in tensors])


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
        self.refused: list[Reason] = []
        self.unrecorded: list[Reason] = []
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
        refused: list[Reason] = []
        unrecorded: list[Reason] = []
        try:
            for reason, is_needed in values.refusals(read_head(head)):
                if reason:
                    (refused if is_needed or is_strict else unrecorded).append(reason)
                yield
        except Exception as error:
            fail_open.raise_if_meant(error)
            refused.append(
                Reason("state-unreadable", f"the record of boundary {self._at} cannot be read back: {error!r}")
            )
        self.refused = list(dict.fromkeys(refused))
        self.unrecorded = list(dict.fromkeys(unrecorded))
