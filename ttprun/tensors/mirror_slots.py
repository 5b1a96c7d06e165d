"""A slot of a mirror: how a rank's tensors lie in it, written by the rank and read after its loss.

A header in JSON describes the state and says where each tensor begins; then come weights and optimizer state, the next
step's gradients, and one byte a parameter that says whether there is one. Begin with `Layout` and `Stored`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from ttprun.device import accelerator
from ttprun.introspect import fail_open
from ttprun.introspect.model_tensors import local_of
from ttprun.protocol.board import SlotContent
from ttprun.protocol.snapshot_messages import MirroredShare, Share
from ttprun.state import tensor_file
from ttprun.state.chunks import Chunk
from ttprun.state.files import write_file
from ttprun.state.tensor_file import chunks, metadata_of
from ttprun.tensors import replicated, sharded
from ttprun.tensors.memory import Memory
from ttprun.tensors.replicated import parameter_of
from ttprun.tensors.shares import Differing, version_of

_ALIGNED = 64  # bytes
_LENGTH_BYTES = 8  # of the header, at the beginning of a slot


class Layout(NamedTuple):
    """Where things are in a slot.

    header      packed: what `Stored` reads
    forms       of parameters and states for which it was made, see `own_state.held_now`
    state       offsets of weights and optimizer state, in the order of `replicated.describe`
    gradients   offset of each parameter's gradient
    before      offset of each parameter's weights before the next step, if the script may change them; else empty
    marks       offset of one byte a parameter: whether there is a gradient
    size        of the slot in bytes
    """

    header: bytes
    forms: list[tuple[Any, ...]]
    state: list[int]
    gradients: list[int]
    before: list[int]
    marks: int
    size: int


class Part(NamedTuple):
    """The newest part of a slot: all but the gradients of the next step, or these.

    held    what the slot holds with this part
    path    of the slot's memory
    at      offset in it, in bytes
    size    in bytes
    whole   of the slot, in bytes
    """

    held: SlotContent
    path: str
    at: int
    size: int
    whole: int


class Slot:
    """One slot: its memory, and the tensors in it for one layout.

    split   offset at which the state ends, and what the next step needs begins
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.memory = Memory(path)
        self.release()

    def release(self) -> None:
        """Drop the tensors in it."""
        self._layout: Layout | None = None
        self.split = 0
        self.state: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []
        self.marks = torch.empty(0)

    def lay_out(self, layout: Layout, state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Fit the memory to a layout, and take the tensors in it. Raises OSError."""
        if self._layout is layout:
            return
        self.release()
        self.memory.fit(layout.size)
        self.memory.write(len(layout.header).to_bytes(_LENGTH_BYTES, "little") + layout.header)
        of_memory = self.memory.tensor
        self.state = [of_memory(at, tensor) for at, tensor in zip(layout.state, state, strict=True)]
        self.gradients = [of_memory(at, tensor) for at, tensor in zip(layout.gradients, weights, strict=True)]
        self.before = [of_memory(at, tensor) for at, tensor in zip(layout.before, weights, strict=False)]
        self.marks = of_memory(layout.marks, torch.empty(len(weights), dtype=torch.uint8))
        self.split = layout.gradients[0]
        self._layout = layout

    def part(self, content: SlotContent) -> Part:
        """The part with which it holds this; it has been laid out."""
        whole = self.memory.size
        at, end = (self.split, whole) if content.has_step else (0, self.split)
        return Part(content, self.path, at, end - at, whole)


def lay_out(rows: list[replicated.Row], forms: list[tuple[Any, ...]], is_kept: bool) -> Layout:
    """A layout for the tensors of these parameters. Raises NotRepairableError."""
    described, parts = replicated.describe()
    where = [part.place for part in parts]
    forms_held = [[str(part.tensor.dtype)[6:], list(part.tensor.shape), _chunk_of(part)] for part in parts]
    at = 0

    def place_for(size: int) -> int:
        nonlocal at
        place, at = at, at + -(-size // _ALIGNED) * _ALIGNED
        return place

    weights = [local_of(parameter) for _, parameter, *_ in rows]
    state = [place_for(part.tensor.nbytes) for part in parts]
    gradients = [place_for(weight.nbytes) for weight in weights]
    before = [place_for(weight.nbytes) for weight in weights] if is_kept else []
    marks = place_for(len(weights))
    content = {"header": described, "places": where, "state": state, "gradients": gradients, "before": before}
    content |= {"parameters": replicated.keys(), "keys": [part.key for part in parts], "forms": forms_held}
    # Offsets in the header are from its own end, as its length depends on them.
    header = json.dumps(content | {"marks": marks}).encode()
    start = -(-(_LENGTH_BYTES + len(header)) // _ALIGNED) * _ALIGNED

    def moved(offsets: list[int]) -> list[int]:
        return [start + offset for offset in offsets]

    return Layout(header, forms, moved(state), moved(gradients), moved(before), start + marks, start + at)


def _chunk_of(part: replicated.Part) -> list[Any] | None:
    """Which part of the whole it is: [shape, offsets, sizes]; None: all of it, or one that no checkpoint can hold."""
    if sharded.why_not_stored([part.whole]):
        return None
    chunk = part.chunk
    return None if chunk is None else [list(chunk.shape), list(chunk.offsets), list(chunk.sizes)]


class Stored:
    """What a lost rank has left in a slot. Raises OSError, ValueError if it is something else."""

    def __init__(self, path: str) -> None:
        self._memory = Memory(path)
        self._memory.open()
        size = int.from_bytes(self._memory.read(0, _LENGTH_BYTES), "little")
        content = json.loads(self._memory.read(_LENGTH_BYTES, size))
        self._start = -(-(_LENGTH_BYTES + size) // _ALIGNED) * _ALIGNED
        self.header: list[Any] = content["header"]
        self.places: list[str | None] = content["places"]
        self.state: list[int] = content["state"]
        self.gradients: list[int] = content["gradients"]
        self.before: list[int] = content["before"]
        self._marks: int = content["marks"]
        self.parameters: list[str] = content["parameters"]
        self.keys: list[str] = content["keys"]
        self.forms: list[tuple[str, list[int], list[Any] | None]] = content["forms"]

    def tensor(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """What is at an offset, of the form of another tensor.

        like     gives dtype and shape
        offset   in bytes, as in `state`, `gradients` and `before`
        returns  a view of the slot's memory, on the CPU

        Raises ValueError if the slot is too small.
        """
        return self._memory.tensor(self._start + offset, like)

    def copy_to(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill a tensor with what is at an offset.

        tensor   written; any dtype, shape and device
        offset   as for `tensor`
        """
        with torch.no_grad():
            tensor.copy_(self.tensor(tensor, offset))

    def has_gradient(self, number: int) -> bool:
        """Whether the parameter had a gradient in the step."""
        return bool(self._memory.read(self._start + self._marks + number, 1)[0])


# What this rank has got from FSDP's reduce-scatters since the newest boundary, in shared memory of the node.
#
# A replacement with a mirror takes these results instead of taking part in the operations again, so that the other
# ranks need not keep what they had put into them: whole gradients.


# Boundary, hash of the sequence, number in it, offset, bytes; boundary 0: it is not valid.
_RECORD = struct.Struct("<5q")
_MOST = 4096  # operations of one step
_BEGIN = _MOST * _RECORD.size
_PARTS_ALIGNED = 64  # bytes
_NOTHING = (0, 0, 0, 0, 0)


class ReducedParts:
    """The results of one rank; written and read in the order of its operations.

    path         of the agent's memory
    check_room   called before it takes so many bytes more; raises if these are too many
    size         in bytes, as far as it is used
    """

    def __init__(self, path: str, check_room: Callable[[int], None]) -> None:
        self._memory = Memory(path)
        self._check_room = check_room
        self.size = 0
        self._boundary = -1
        self._count = 0  # of this boundary's so far

    def keep(self, boundary: int, sequence: str, number: int, result: torch.Tensor) -> None:
        """Copy a result; not again if the lost rank had kept it.

        boundary   after which the operation was issued
        sequence   of the journal's entry
        number     of the entry in its sequence, since the boundary
        result     any dtype, shape and device

        Raises OSError, ValueError, and what `check_room` raises.
        """
        at, offset = self._next(boundary)
        key = (boundary, _hash_of(sequence), number, offset, result.nbytes)
        if self._read(at) == key:
            return
        if (more := offset + result.nbytes - self.size) > 0:
            self._check_room(more)
            self._fit(offset + result.nbytes)
        elif not result.is_cpu:
            self._memory.pin_more()  # not while it grows, which is a new mapping each time
        self._write(at, _NOTHING)
        with accelerator.beside():  # it has completed, and waits for nothing that the script computes meanwhile
            self._memory.tensor(offset, result).copy_(result.detach())
        self._write(at, key)

    def release(self) -> None:
        """Give the memory back: nothing is kept any more."""
        self._memory.release()
        self.size = 0

    def take(self, boundary: int, sequence: str, number: int, target: torch.Tensor) -> None:
        """Fill a tensor with a result of the lost rank.

        boundary, sequence, number   as for `keep`
        target                   any dtype, shape and device; of the same size in bytes as the result

        Raises LookupError if it is not there, OSError, ValueError.
        """
        self._fit(_BEGIN)
        wanted = (boundary, _hash_of(sequence), number)
        for at in range(_MOST):
            *key, offset, size = self._read(at)
            if tuple(key) == wanted and size == target.nbytes:
                with torch.no_grad():
                    target.copy_(self._memory.tensor(offset, target))
                return
        raise LookupError(f"what reduce-scatter {number} of group {sequence} has given is not in the mirror")

    def _next(self, boundary: int) -> tuple[int, int]:
        """(number of the record, offset) for the next result."""
        if boundary != self._boundary:
            self._boundary, self._count = boundary, 0
        at = self._count
        if at == _MOST:
            raise ValueError(f"more than {_MOST} reduce-scatters in one step")
        self._count += 1
        if at == 0:
            return at, _BEGIN
        *_, offset, size = self._read(at - 1)
        return at, offset + -(-size // _PARTS_ALIGNED) * _PARTS_ALIGNED

    def _fit(self, size: int) -> None:
        """Map the memory, and make it large enough; what is there stays."""
        if self.size == 0 and self._memory.held_bytes():
            self._memory.open()
            self.size = self._memory.size
        if size > self.size:
            self._memory.fit(size)
            self.size = size

    def _read(self, at: int) -> tuple[int, ...]:
        self._fit(_BEGIN)
        return _RECORD.unpack(self._memory.read(at * _RECORD.size, _RECORD.size))

    def _write(self, at: int, record: tuple[int, ...]) -> None:
        self._memory.write(_RECORD.pack(*record), at * _RECORD.size)


def _hash_of(sequence: str) -> int:
    return int(xxhash.xxh3_64_intdigest(sequence.encode())) >> 1  # as a signed number


# The share of a checkpoint that a lost rank cannot write any more: another rank writes it, from its mirror.
#
# Only what no living rank holds is in it.


def write(order: MirroredShare, owners: Mapping[str, Sequence[int]], writers: Sequence[int]) -> Share:
    """Write what a lost rank alone held to a new file of a checkpoint.

    owners    as in `Differing`
    writers   ranks that write shares of their own

    Raises NotRepairableError, OSError, ValueError.
    """
    stored = Stored(order.slot)
    differing = Differing(owners, order.rank, (*writers, order.rank))
    mine: dict[str, torch.Tensor] = {}
    chunks_of: dict[str, Chunk] = {}
    for key, tensor, chunk in _parts(stored):
        if chunk is not None and tensor.numel():
            mine[key], chunks_of[key] = tensor, chunk
        elif chunk is None and differing.holds(key) and _holds_alone(differing, key, writers):
            mine[differing.stored(key)] = tensor
    try:
        header, tensors = tensor_file.lay_out(mine, {"format": "pt"} | metadata_of(mine, chunks_of))
    except ValueError as error:
        raise fail_open.NotRepairableError(str(error)) from None
    Path(order.path).unlink(missing_ok=True)
    entry = write_file(Path(order.path), chunks(header, tensors))
    common = [row for key, row in zip(stored.parameters, stored.header, strict=True) if key not in owners]
    return Share(
        order.share,
        bytes=entry.bytes,
        xxh3=entry.xxh3,
        header_xxh3=xxhash.xxh3_64_hexdigest(json.dumps(common).encode()),
        digests={},
        differing=version_of(owners),
        header=stored.header if owners else [],
    )


def _holds_alone(differing: Differing, key: str, writers: Sequence[int]) -> bool:
    owners = differing.owners[parameter_of(key)]
    return all(owners[rank] != owners[differing.rank] for rank in writers)


def _parts(stored: Stored) -> Iterator[tuple[str, torch.Tensor, Chunk | None]]:
    """(key, tensor, which part of the whole it is, None for all) in the order of `replicated.describe`."""
    for key, offset, (dtype, shape, chunk) in zip(stored.keys, stored.state, stored.forms, strict=True):
        like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        yield key, stored.tensor(like, offset), None if chunk is None else Chunk(*map(tuple, chunk))
