"""Evidence of the current step in shared memory, with which a replacement is compared (proof.py).

Under data parallelism, wrong state of one rank gives a wrong gradient, which reaches all ranks alike: comparing weights
never shows it. So each rank notes samples, before they are used, of the batches of its DataLoaders, of the losses on
which it calls backward, and of the inputs of its collectives. Begin with `Evidence.note`.

What replacements have come to where that differed is kept, too: if two of them differ, the script's arithmetic is not
reproducible.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import xxhash

from ttprun.introspect.looks import is_a
from ttprun.introspect.tensor_bytes import bytes_of

ENTRIES = 256  # of one step; later ones are not noted
SAMPLE_BYTES = 512
WHOLE_BYTES = 64 << 10  # a tensor up to this size is hashed whole; of a larger one, LINES lines
LINES = 64
LINE_BYTES = 64  # a cache line
_WORD_BYTES = 16  # the longest element; lines and their starts are multiples of it
_SAMPLED_BYTES = 8  # whole elements of each floating dtype
_HEAD = struct.Struct("<qq")  # step, entries
_ENTRY = struct.Struct("<HHIQQ")  # kind, bytes of the sample, number, key, digest
_ENTRY_BYTES = _ENTRY.size + SAMPLE_BYTES
_STEP_BYTES = _HEAD.size + ENTRIES * _ENTRY_BYTES
_STEPS = 2  # a lost rank may be one step ahead of the boundary at which all resume
SNAPSHOTS = 2  # steps that follow a snapshot, with which ranks that go back to it are compared
_TRIED_AT = (_STEPS + SNAPSHOTS) * _STEP_BYTES
_TRIED_HEAD = struct.Struct("<qqq")  # whether this rank's arithmetic is not reproducible, step, entries
_TRIED = struct.Struct("<HxxIQQ")  # kind, number, key, digest
MOST_TRIED = 32
REGION_BYTES = _TRIED_AT + _TRIED_HEAD.size + MOST_TRIED * _TRIED.size

BATCH, LOSS, INPUT = range(3)
Place = tuple[int, int, int]  # kind, key of the loader or group, index among these in the step
_ROUNDING = 4096  # units in the last place of the largest element
_MOST_ROUNDING = 0.05  # of the largest element
_MOST_TENSORS = 32  # of a batch, a loss or a collective


@functools.cache
def _key_of(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


@dataclass(frozen=True, slots=True)
class Noted:
    """One batch, loss or input.

    digest   of all sampled bytes
    sample   bytes of some elements of the tensors that have the first one's dtype
    """

    digest: int
    sample: bytes


class Evidence:
    """The notes of this rank's current step, by this process and an older one of the same rank.

    region   shared memory of REGION_BYTES, which outlives the process
    """

    def __init__(self, region: memoryview) -> None:
        self._region = region
        self._step = -1
        self._at = 0
        self._count = 0
        self._counts: Counter[tuple[int, int]] = Counter()
        self._newest = -1  # step of which a loss or an input was noted
        self._apart = 1  # steps from one of these to the next

    def clear(self) -> None:
        """Forget all steps."""
        for number in range(_STEPS + SNAPSHOTS):
            _HEAD.pack_into(self._region, number * _STEP_BYTES, -1, 0)
        _TRIED_HEAD.pack_into(self._region, _TRIED_AT, self.is_noisy, -1, 0)

    def keep(self, step: int, number: int) -> None:
        """A snapshot is taken, and this step begins: what is noted of it stays until the place has another snapshot.

        number   of the snapshot's place, below SNAPSHOTS
        """
        _HEAD.pack_into(self._region, (_STEPS + number) * _STEP_BYTES, step, 0)

    def take_over(self, older: Evidence, step: int) -> None:
        """Have what another one holds of a step."""
        here, there = self._at_of(step), older._at_of(step)
        if _HEAD.unpack_from(older._region, there)[0] == step:
            self._region[here : here + _STEP_BYTES] = older._region[there : there + _STEP_BYTES]

    def _at_of(self, step: int) -> int:
        """Where a step is noted."""
        places = range(_STEPS * _STEP_BYTES, _TRIED_AT, _STEP_BYTES)
        kept = (at for at in places if _HEAD.unpack_from(self._region, at)[0] == step)
        return next(kept, step % _STEPS * _STEP_BYTES)

    def note(self, step: int, kind: int, name: str, tensors: Sequence[torch.Tensor]) -> tuple[Place, Noted]:
        """Note one batch, loss or input; returns its place in the step, and what was noted.

        step      the boundary that it follows
        kind      BATCH, LOSS or INPUT
        name      of the loader or group
        tensors   dense, any dtype, shape and device; of the first _MOST_TENSORS

        The note of an older process at the same place of the same step is kept.
        """
        if step != self._step:
            self._begin(step)
        if kind != BATCH and step != self._newest:
            self._apart = max(step - self._newest, 1) if self._newest >= 0 else 1
            self._newest = step
        key = _key_of(name)
        number = self._counts[kind, key]
        self._counts[kind, key] += 1
        noted = Noted(*sampled(tensors, step + number))
        at = sum(self._counts.values()) - 1
        if at == self._count < ENTRIES:
            start = self._at + _HEAD.size + at * _ENTRY_BYTES
            sample = noted.sample
            _ENTRY.pack_into(self._region, start, kind, len(sample), number, key, noted.digest)
            self._region[start + _ENTRY.size : start + _ENTRY.size + len(sample)] = sample
            self._count += 1
            _HEAD.pack_into(self._region, self._at, step, self._count)  # last: a killed rank leaves complete entries
        return (kind, key, number), noted

    def is_likely(self, step: int) -> bool:
        """Whether a loss or an input will be noted of a step, if the script goes on as it has.

        Optimizers that step one after the other compute nothing in between.
        """
        return (step - self._newest) % self._apart == 0

    def _begin(self, step: int) -> None:
        self._step = step
        self._at = self._at_of(step)
        self._counts.clear()
        known, count = _HEAD.unpack_from(self._region, self._at)
        self._count = count if known == step else 0
        if known != step:
            _HEAD.pack_into(self._region, self._at, step, 0)

    def left(self, step: int) -> dict[Place, Noted]:
        """What this rank's processes have noted of a step."""
        at = self._at_of(step)
        known, count = _HEAD.unpack_from(self._region, at)
        found = {}
        for entry in range(count if known == step else 0):
            start = at + _HEAD.size + entry * _ENTRY_BYTES
            kind, size, number, key, digest = _ENTRY.unpack_from(self._region, start)
            sample = bytes(self._region[start + _ENTRY.size : start + _ENTRY.size + size])
            found[kind, key, number] = Noted(digest, sample)
        return found

    # What replacements have come to.

    @property
    def is_noisy(self) -> bool:
        """Whether processes of this rank have come to other bits from the same state."""
        return bool(_TRIED_HEAD.unpack_from(self._region, _TRIED_AT)[0])

    def tried(self, step: int, place: Place) -> list[int]:
        """The digests of what older replacements have come to at a place, where that was not the lost rank's."""
        _, known, count = _TRIED_HEAD.unpack_from(self._region, _TRIED_AT)
        start = _TRIED_AT + _TRIED_HEAD.size
        entries = (_TRIED.unpack_from(self._region, start + at * _TRIED.size) for at in range(count))
        return [digest for kind, number, key, digest in entries if (known, kind, key, number) == (step, *place)]

    def note_tried(self, step: int, place: Place, noted: Noted) -> bool:
        """A replacement has come to something else than the lost rank; False if there is no room for more."""
        noisy, known, count = _TRIED_HEAD.unpack_from(self._region, _TRIED_AT)
        count = count if known == step else 0
        if count == MOST_TRIED:
            return False
        kind, key, number = place
        at = _TRIED_AT + _TRIED_HEAD.size + count * _TRIED.size
        _TRIED.pack_into(self._region, at, kind, number, key, noted.digest)
        _TRIED_HEAD.pack_into(self._region, _TRIED_AT, noisy, step, count + 1)
        return True

    def note_noise(self) -> None:
        """Two processes of this rank have come to different bits from the same state."""
        _, step, count = _TRIED_HEAD.unpack_from(self._region, _TRIED_AT)
        _TRIED_HEAD.pack_into(self._region, _TRIED_AT, 1, step, count)


def sampled(tensors: Sequence[torch.Tensor], salt: int) -> tuple[int, bytes]:
    """(digest of the tensors, or of parts of large ones; bytes of some elements of those of the first one's dtype).

    tensors   dense, any dtype, shape and device; those after the first _MOST_TENSORS are left out
    salt      selects the parts: others in each step, the same in each process
    """
    state = xxhash.xxh3_64()
    sample = b""
    room = SAMPLE_BYTES // min(len(tensors), _MOST_TENSORS) // _SAMPLED_BYTES * _SAMPLED_BYTES if tensors else 0
    for tensor in tensors[:_MOST_TENSORS]:
        if tensor.is_cpu or tensor.nbytes <= WHOLE_BYTES or not tensor.is_contiguous():
            view = _memory(tensor)
            part = view if len(view) <= WHOLE_BYTES else _lines(view, salt)
        else:
            part = _lines_on_device(tensor, salt)
        state.update(part)
        if tensor.dtype == tensors[0].dtype:
            sample += _spread(part, room)
    return state.intdigest(), sample


def _spread(part: Any, room: int) -> bytes:
    """At most `room` bytes of whole elements, from all of it."""
    if len(part) <= room:
        return bytes(part)
    words = numpy.frombuffer(part, numpy.uint64, len(part) // _SAMPLED_BYTES)
    return words[:: -(-len(words) * _SAMPLED_BYTES // room)].tobytes()


def _memory(tensor: torch.Tensor) -> Any:
    """As `bytes_of`, quicker; only valid while the tensor lives."""
    if tensor.is_cpu and tensor.nbytes and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return bytes_of(tensor)


def _place_of_lines(size: int, salt: int) -> tuple[int, int]:
    """(bytes from one line to the next, where each begins)."""
    stride = size // LINES // _WORD_BYTES * _WORD_BYTES
    return stride, salt * LINE_BYTES % (stride - LINE_BYTES + 1) // _WORD_BYTES * _WORD_BYTES


def _lines_on_device(tensor: torch.Tensor, salt: int) -> memoryview:
    """As `_lines`, of which alone are copied to the CPU."""
    stride, at = _place_of_lines(tensor.nbytes, salt)
    flat = tensor.detach().view(-1).view(torch.uint8)[: LINES * stride]
    return _in_order(numpy.frombuffer(bytes_of(flat.view(LINES, stride)[:, at : at + LINE_BYTES]), numpy.uint8))


def _lines(view: Any, salt: int) -> memoryview:
    """Lines spread over the whole view, the first words of each before the rest."""
    stride, at = _place_of_lines(len(view), salt)
    array: Any = numpy.frombuffer(view, numpy.uint8, LINES * stride).reshape(LINES, stride)
    return _in_order(array[:, at : at + LINE_BYTES])


def _in_order(lines: Any) -> memoryview:
    lines = lines.reshape(LINES, LINE_BYTES)
    words = SAMPLE_BYTES // LINES
    return memoryview(lines[:, :words].tobytes() + lines[:, words:].tobytes())


def comparable(values: Iterable[Any]) -> list[torch.Tensor]:
    """The dense tensors among some values."""
    return [one for one in values if is_a(one, torch.Tensor) and one.layout is torch.strided and not one.is_meta]


def is_close(one: bytes, other: bytes, dtype: torch.dtype) -> bool:
    """Whether two samples differ by rounding alone, as sums of several threads do.

    one, other   bytes of the same elements of both tensors
    dtype        of both; only floating ones can be close
    """
    if not (dtype.is_floating_point and one) or len(one) != len(other) or len(one) % dtype.itemsize:
        return False
    here, there = (torch.frombuffer(bytearray(sample), dtype=dtype).double() for sample in (one, other))
    largest = max(here.abs().max().item(), there.abs().max().item())
    return bool(((here - there).abs() <= min(_ROUNDING * torch.finfo(dtype).eps, _MOST_ROUNDING) * largest).all())
