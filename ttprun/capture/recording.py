"""What is written at a boundary: the state of the script, gathered into a record.

The fields are those of records/boundary_record.py. Begin with `describe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import msgspec
import torch

from ttprun.capture import values
from ttprun.capture.data import loaders
from ttprun.capture.effects import file_answers, os_entropy, script_files
from ttprun.capture.host import Host
from ttprun.capture.position import call_site, iterables, loop_sites, loops, made_inside
from ttprun.capture.records.boundary_record import BoundaryRecord, PassRecord, ScriptState, read_state
from ttprun.introspect import host_copies, random_state
from ttprun.introspect.tensor_bytes import bytes_of, plain_together


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
    """What others add to a record: its fields of the same names (records/boundary_record.py)."""

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
    host: Host,
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
    not_proved = file_answers.not_proved() + loaders.not_proved()
    if snapshot.not_proved:
        names = ["" if code.co_name == "<module>" else code.co_qualname for code in whereabouts.codes]
        scopes = dict(zip(names, variables, strict=True)) | modules
        scopes["optimizers"] = dict(zip(map(str, range(len(optimizers))), optimizers, strict=True))
        not_proved = values.names_not_proved(snapshot, scopes) + not_proved
    blobs, are_here = snapshot.blobs, not host_copies.waiting
    for blob in blobs:
        are_here = are_here and blob.is_cpu
    if not are_here:
        blobs = host_copies.take(blobs)
    others = beside()
    record = BoundaryRecord(
        boundary=boundary,
        place=whereabouts.place,
        dead=whereabouts.dead,
        unfollowed=whereabouts.why_not or made_inside.why_skipped(boundary, whereabouts),
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
        has_steps=loop_sites.keys_with_steps,
        weights=others.weights,
        held=others.held,
        kept=others.kept,
        entropy=os_entropy.drawn_since_last_asked(),
        blobs=[blob.nbytes for blob in blobs],
        not_proved=not_proved,
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
