"""What is written at a boundary: the one description of a record's fields, for who writes it and for who reads it.

A record's head is one `BoundaryRecord`, packed; the bytes of tensors follow it as blobs. Whatever is read is checked
against the types here, and nothing is unpickled. Fields with a default are not in older checkpoints. Begin with
`BoundaryRecord`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ttprun.capture.records.nodes import Node
from ttprun.capture.records.packing import unpack_as
from ttprun.protocol.reason import Reason

RngState = dict[str, Any]
Scope = dict[str, Node]  # name -> node


class LoopRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An active followed loop.

    site        its place in the script: file:line:column
    position    items yielded so far
    lead        items yielded before the first boundary inside was reached; 0 before that
    began_with  states of the random generators before what it runs over was evaluated
    item_rng    the same when the current item was yielded, if it is around another loop
    current     the item, if it is plain
    bounds      (start, stop, step) if it runs over a range
    is_inside   the step is taken while the next item is made
    over        what it runs over, if its position does not determine that
    earlier     see position/loops.py
    """

    site: str
    position: int
    lead: int
    began_with: RngState | None
    item_rng: RngState | None
    current: Any
    bounds: list[int] | None
    is_inside: bool
    over: Node = None
    earlier: int = 0


class PassRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a pass of a `while` loop began in which the script has made an optimizer: a replay begins with that pass.

    site    of the loop: file:line:column
    state   the ScriptState there, packed
    blobs   its blobs
    rng     states of the global random generators there
    """

    site: str
    state: bytes
    blobs: list[bytes]
    rng: RngState


class ScriptState(msgspec.Struct, frozen=True, kw_only=True):
    """The variables of the script, at a boundary or between two.

    place       [file, function, line] of each of the user's frames, outermost first
    variables   of each of these frames
    loops       of each of these frames, its active loops, outermost first
    modules     the variables of each module of the user's, but for those among the frames
    optimizers  their nodes, in the order in which they were made
    stepped     of each optimizer: numbers of its parameters and of its state tensors
    blobs       bytes of each
    returned    the result of the step's closure
    dead        of each frame: names of its variables that are set before they are read
    """

    place: list[list[Any]]
    variables: list[Scope]
    loops: list[list[LoopRecord]]
    modules: dict[str, Scope]
    optimizers: list[Node]
    stepped: list[list[int]]
    blobs: list[int]
    returned: Node = None
    dead: list[list[str]] = []

    def frames(self) -> Iterator[tuple[list[Any], Scope, list[str]]]:
        """(place, variables, names of the dead ones) of each of the user's frames, outermost first."""
        return zip(self.place, self.variables, self.dead or [[]] * len(self.place), strict=True)


class BoundaryRecord(ScriptState, frozen=True, kw_only=True):
    """All that is written at a boundary, beside the blobs.

    boundary         its number
    unfollowed       why no replay can come here, and the kind of that reason; "" if one may
    generator_loops  active loops in suspended generators of the user's
    rng              states of the global random generators
    loaders          of each iterator over a DataLoader in use: see data/loaders.py
    loaders_made     how many loaders were made at each place of the script
    groups_made      how many process groups of each name and ranks were made
    results          of the small collectives of the step that ends here: see groups/results.py
    rebuilt          of each wrapped model, whether it has rebuilt its buckets
    files            [path, bytes written] of each file that is open for writing
    at_ns            the time, as the kernel notes it in files
    has_steps        the loops inside of which a step was ever taken
    weights          a hash of samples of the weights; b"" if they are sharded
    held             the same of what may differ between ranks, see tensors/holdings.py
    kept             copies of the weights are made after each step
    entropy          how often the script has drawn from os.urandom in the step
    is_straight      a replay goes directly here: nothing earlier is used
    named            what can change and is not recorded
    is_draining      batches of an ended loader are trained on
    stepping         number of the optimizer that is about to step; None: it is not known
    is_before_step   the optimizer communicates inside step(): the boundary lies before the step, not after it
    passes           of the `while` loops around the step whose passes make optimizers, outermost first
    """

    boundary: int
    unfollowed: str
    unfollowed_kind: str = "loop-not-followed"
    generator_loops: list[LoopRecord]
    rng: RngState
    loaders: list[dict[str, Any]]
    results: list[tuple[int, str, list[bytes]]]
    rebuilt: list[bool]
    files: list[list[Any]]
    at_ns: int
    has_steps: list[str]
    weights: bytes
    kept: bool
    entropy: int
    is_straight: bool = False
    named: list[Reason] = []
    loaders_made: dict[str, int] = {}
    groups_made: dict[str, int] = {}
    held: bytes = b""
    is_draining: bool = False
    stepping: int | None = None
    is_before_step: bool = False
    passes: list[PassRecord] = []

    def active(self) -> list[LoopRecord]:
        """All active loops, those of suspended generators last."""
        return [*(loop for of_frame in self.loops for loop in of_frame), *self.generator_loops]


class Outline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the agent reads of a record; that of a framework has random states alone, and none of these."""

    weights: bytes = b""
    held: bytes = b""
    stepped: list[list[int]] = []


class Record(NamedTuple):
    """A record that was read from a recorder or a checkpoint.

    blobs   bytes of each
    """

    fields: BoundaryRecord
    blobs: list[memoryview]

    @classmethod
    def of(cls, head: bytes, blobs: bytes) -> Record:
        """Unpack a record as a recorder returns it.

        head    the packed plain part
        blobs   all of them, one after the other

        Raises MalformedRecordError.
        """
        fields = read_head(head)
        parts, at = [], 0
        for size in fields.blobs:
            parts.append(memoryview(blobs)[at : at + size])
            at += size
        return cls(fields, parts)


_decoder = msgspec.msgpack.Decoder(BoundaryRecord)
_decoder_of_outline = msgspec.msgpack.Decoder(Outline)
_decoder_of_state = msgspec.msgpack.Decoder(ScriptState)


def read_outline(head: bytes) -> Outline:
    """Of a record's packed part. Raises MalformedRecordError."""
    return unpack_as(_decoder_of_outline, head)


def read_head(head: bytes) -> BoundaryRecord:
    """The fields of a record's packed part. Raises MalformedRecordError."""
    return unpack_as(_decoder, head)


def read_state(packed: bytes) -> ScriptState:
    """The variables alone of what was packed, a record or a look between two. Raises MalformedRecordError."""
    return unpack_as(_decoder_of_state, packed)
