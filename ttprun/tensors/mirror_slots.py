"""An image of a rank's state in shared memory: how its tensors lie there, written by the rank and read after its loss.

It begins as a file of safetensors with weights and optimizer state, whose header describes the state, too. In a mirror
(mirror.py) what the next step needs follows: the gradients, the weights if the script changes them, and one byte a
parameter that says whether there is a gradient. Two images take turns, so that one is complete at any moment; the board
says what is in each of them. Begin with `Layout` and `Stored`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from ttprun.device import accelerator
from ttprun.introspect import fail_open
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.safe_reads import is_a
from ttprun.protocol.board import SlotContent
from ttprun.protocol.reason import Reason
from ttprun.protocol.snapshot_messages import MirroredShare, Share
from ttprun.state import tensor_file
from ttprun.state.chunks import Chunk
from ttprun.state.files import write_file
from ttprun.state.tensor_file import chunks, metadata_of
from ttprun.tensors import replicated, sharded
from ttprun.tensors.memory import Memory
from ttprun.tensors.replicated import WEIGHT, PostStepWeights, parameter_of
from ttprun.tensors.shares import Differing, version_of

_ALIGNED = 64  # bytes
_LENGTH_BYTES = 8  # of the header, at the beginning of a file of safetensors
HEADER = "ttprun"  # the key of the description in that header


class Layout:
    """Where things are in an image, by its first bytes: who reads it finds them as who wrote it. Raises ValueError.

    head       these bytes
    forms      for which it was made: of each parameter, and of each value of its state with its name, shape and dtype
               or the value; not in what is read
    described  the state, by `replicated.describe`
    keys, places   of each tensor of it, in that order: its key, and which part of a sharded one it is
    kinds      dtype, shape, and which part it is as [shape, offsets, sizes]; None: all, or what no checkpoint can hold
    state      offsets of these tensors
    weights    which of them are the parameters' weights
    gradients  offset of each parameter's gradient
    before     offset of each parameter's weights before the next step, if the script may change them; else empty
    marks      offset of one byte a parameter: whether there is a gradient
    times      as for `held_now`
    split      at which the state ends, and what the next step needs begins
    size       in bytes
    """

    def __init__(self, head: bytes, forms: Sequence[tuple[Any, ...]] = ()) -> None:
        self.head, self.forms = head, forms
        header = json.loads(head[_LENGTH_BYTES:])
        self.described, parts, self.times = json.loads(header["__metadata__"][HEADER])
        self.keys, self.places, self.kinds = ([part[at] for part in parts] for at in range(3))
        spans = [[len(head) + at for at in header[key]["data_offsets"]] for key in self.keys]
        self.state = [begin for begin, _ in spans]
        tensors_of = (1 + sum(is_tensor for _, is_tensor, *_ in state) for _, _, state in self.described)
        *self.weights, _ = accumulate(tensors_of, initial=0)
        end = max((end for _, end in spans), default=len(head))
        self.split = _aligned(end) if self.times else end
        sizes = [_aligned(spans[at][1] - spans[at][0]) for at in self.weights]
        *places, self.marks = accumulate(sizes * self.times, initial=self.split)
        self.gradients, self.before = places[: len(sizes)], places[len(sizes) :]
        self.size = self.marks + len(self.gradients)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


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
    """One image: its memory, and the tensors in it for one layout."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.memory = Memory(path)
        self.release()

    def release(self) -> None:
        """Drop the tensors in it."""
        self._layout: Layout | None = None
        self.state: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []
        self.marks = torch.empty(0)

    def lay_out(self, layout: Layout, state: Sequence[torch.Tensor]) -> None:
        """Fit the memory to a layout, and take the tensors in it. Raises OSError."""
        if self._layout is layout:
            return
        self.release()
        self.memory.fit(layout.size)
        self.memory.write(layout.head)
        of_memory = self.memory.tensor
        weights = [state[at] for at in layout.weights]
        self.state = [of_memory(at, tensor) for at, tensor in zip(layout.state, state, strict=True)]
        self.gradients = [of_memory(at, tensor) for at, tensor in zip(layout.gradients, weights, strict=False)]
        self.before = [of_memory(at, tensor) for at, tensor in zip(layout.before, weights, strict=False)]
        self.marks = of_memory(layout.marks, torch.empty(len(self.gradients), dtype=torch.uint8))
        self._layout = layout

    def copy(self, state: list[torch.Tensor]) -> None:
        """Copy the state into it, after what this thread's stream does now."""
        with torch.no_grad():
            torch._foreach_copy_(self.state, state, non_blocking=True)
            accelerator.finish_here()

    def part(self, content: SlotContent) -> Part:
        """The part with which it holds this; it has been laid out."""
        assert self._layout is not None
        whole, split = self._layout.size, self._layout.split
        at, end = (split, whole) if content.has_step else (0, split)
        return Part(content, self.path, at, end - at, whole)


def held_now(layout: Layout | None, kept: PostStepWeights, times: int) -> tuple[Layout, list[torch.Tensor]]:
    """A layout for this rank's state, the same one as long as it fits, and the state's tensors.

    times   how often there is room for something of the form of each parameter: its gradient, and once more

    Raises NotRepairableError, ValueError.
    """
    forms, tensors = list[tuple[Any, ...]](), list[torch.Tensor]()
    for _, parameter, state, _, _ in replicated.rows():
        forms.append((parameter.shape, parameter.dtype))
        tensors.append(kept.of(parameter))
        for name, value in replicated.flat(state):
            if is_a(value, torch.Tensor):
                forms.append((name, value.shape, value.dtype))
                tensors.append(local_of(value))
            else:
                forms.append((name, len(value) if type(value) is list else value))
    if layout is not None and (layout.forms, layout.times) == (forms, times):
        return layout, tensors
    described, parts = replicated.describe()
    about = [described, [[part.key, part.place, _kind_of(part)] for part in parts], times]
    content = {part.key: _as_two_reals(part.tensor) if times else part.tensor for part in parts}
    if len(content) < len(parts):
        said = f"an optimizer keeps a state that is called '{WEIGHT}'"
        raise fail_open.NotRepairableError(Reason("optimizer-state-unknown", said))
    return Layout(tensor_file.lay_out(content, {"format": "pt", HEADER: json.dumps(about)})[0], forms), tensors


def _as_two_reals(tensor: torch.Tensor) -> torch.Tensor:
    """The form under which a file of safetensors has room for complex128, which it cannot name; others as they are."""
    is_wide = tensor.dtype is torch.complex128
    return torch.empty((*tensor.shape, 2), dtype=torch.float64, device="meta") if is_wide else tensor


def _kind_of(part: replicated.Part) -> list[Any]:
    chunk = None if sharded.why_not_stored([part.whole]) else part.chunk
    box = None if chunk is None else [chunk.shape, chunk.offsets, chunk.sizes]
    return [str(part.tensor.dtype)[6:], list(part.tensor.shape), box]


class Stored(Layout):
    """What a lost rank has left in an image. Raises OSError, ValueError if it is something else."""

    def __init__(self, path: str) -> None:
        self._memory = Memory(path)
        self._memory.open()
        size = int.from_bytes(self._memory.read(0, _LENGTH_BYTES), "little")
        super().__init__(self._memory.read(0, _LENGTH_BYTES + size))

    def tensor(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """What is at an offset, of the form of another tensor.

        like     gives dtype and shape
        offset   in bytes, as in `state`, `gradients` and `before`
        returns  a view of the image's memory, on the CPU

        Raises ValueError if the image is too small.
        """
        return self._memory.tensor(offset, like)

    def copy_to(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill a tensor with what is at an offset.

        tensor   written; any dtype, shape and device
        offset   as for `tensor`
        """
        with torch.no_grad():
            tensor.copy_(self.tensor(tensor, offset))

    def has_gradient(self, number: int) -> bool:
        """Whether the parameter had a gradient in the step."""
        return bool(self._memory.read(self.marks + number, 1)[0])


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
    for key, offset, (dtype, shape, chunk) in zip(stored.keys, stored.state, stored.kinds, strict=True):
        tensor = stored.tensor(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), offset)
        if chunk is not None and tensor.numel():
            mine[key], chunks_of[key] = tensor, Chunk(*map(tuple, chunk))
        elif chunk is None and differing.holds(key) and _holds_alone(differing, key, writers):
            mine[differing.stored(key)] = tensor
    try:
        header, tensors = tensor_file.lay_out(mine, {"format": "pt"} | metadata_of(mine, chunks_of))
    except ValueError as error:
        raise fail_open.NotRepairableError(str(error)) from None
    Path(order.path).unlink(missing_ok=True)
    entry = write_file(Path(order.path), chunks(header, tensors))
    parameters = [parameter_of(stored.keys[at]) for at in stored.weights]
    common = [row for key, row in zip(parameters, stored.described, strict=True) if key not in owners]
    return Share(
        order.share,
        bytes=entry.bytes,
        xxh3=entry.xxh3,
        header_xxh3=xxhash.xxh3_64_hexdigest(json.dumps(common).encode()),
        digests={},
        differing=version_of(owners),
        header=stored.described if owners else [],
    )


def _holds_alone(differing: Differing, key: str, writers: Sequence[int]) -> bool:
    owners = differing.owners[parameter_of(key)]
    return all(owners[rank] != owners[differing.rank] for rank in writers)
