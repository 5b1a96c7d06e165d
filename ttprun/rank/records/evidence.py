"""What a rank leaves behind of the step that is under way, so that its replacement can be compared with it.

Under data parallelism wrong state of one rank gives a wrong gradient, which reaches all ranks alike: the weights never
show it. So each rank notes samples of what it gives to the step, in shared memory and before anybody gets it: the
batches that its DataLoaders hand out, the losses that it goes backward from, and the inputs of its collectives. Begin
with `Evidence.note`. What a replacement does otherwise is found by `proof.py`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import xxhash

from ttprun.rank.weights.tensor_bytes import bytes_of

ENTRIES = 256  # of one step; what comes after these is not noted
SAMPLE_BYTES = 512
WHOLE_BYTES = 64 << 10  # up to here all of a tensor is hashed; of a larger one LINES lines
LINES = 64
LINE_BYTES = 64  # what the processor fetches from memory at once
_WORD_BYTES = 16  # of the longest element; lines and their starts are multiples of it
_HEAD = struct.Struct("<qq")  # step, entries
_ENTRY = struct.Struct("<HHIQQ")  # kind, bytes of the sample, number, key, digest
_ENTRY_BYTES = _ENTRY.size + SAMPLE_BYTES
_STEP_BYTES = _HEAD.size + ENTRIES * _ENTRY_BYTES
_STEPS = 2  # a lost rank may have begun one step more than the boundary that all go back to
REGION_BYTES = _STEPS * _STEP_BYTES

BATCH, LOSS, INPUT = range(3)
Place = tuple[
    int, int, int
]  # kind, key of the loader or group, how many of that kind and key came before it in the step
_ROUNDING = 4096  # units in the last place of the largest element
_MOST_ROUNDING = 0.05  # of the largest element
# Of tensors in a batch, or of a loss or a collective, how many are looked at.
_MOST_TENSORS = 32


@dataclass(frozen=True, slots=True)
class Noted:
    """What is known of one thing.

    digest   of all that was looked at
    sample   elements of the first tensor
    """

    digest: int
    sample: bytes


class Evidence:
    """What this rank notes of the running step, and what an older process of the same rank has noted of it.

    region   shared memory of REGION_BYTES, which outlives the process
    """

    def __init__(self, region: memoryview) -> None:
        self._region = region
        self._step = -1
        self._at = 0
        self._count = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def clear(self) -> None:
        """Nothing is known of any step."""
        for number in range(_STEPS):
            _HEAD.pack_into(self._region, number * _STEP_BYTES, -1, 0)

    def note(self, step: int, kind: int, name: str, tensors: Sequence[torch.Tensor]) -> tuple[Place, Noted]:
        """Note what this rank gives to a step; returns where it came in the step, and what was noted.

        step   the boundary that it follows
        name   of the loader or group

        What another process of this rank has noted in the same place of the same step stays as it is.
        """
        if step != self._step:
            self._begin(step)
        key = xxhash.xxh3_64_intdigest(name.encode())
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
            _HEAD.pack_into(self._region, self._at, step, self._count)  # last: a killed rank leaves whole entries only
        return (kind, key, number), noted

    def _begin(self, step: int) -> None:
        self._step = step
        self._at = step % _STEPS * _STEP_BYTES
        self._counts.clear()
        known, count = _HEAD.unpack_from(self._region, self._at)
        self._count = count if known == step else 0
        if known != step:
            _HEAD.pack_into(self._region, self._at, step, 0)

    def left(self, step: int) -> dict[Place, Noted]:
        """What has been noted of a step, by whatever process of this rank."""
        at = step % _STEPS * _STEP_BYTES
        known, count = _HEAD.unpack_from(self._region, at)
        found = {}
        for entry in range(count if known == step else 0):
            start = at + _HEAD.size + entry * _ENTRY_BYTES
            kind, size, number, key, digest = _ENTRY.unpack_from(self._region, start)
            sample = bytes(self._region[start + _ENTRY.size : start + _ENTRY.size + size])
            found[kind, key, number] = Noted(digest, sample)
        return found


def sampled(tensors: Sequence[torch.Tensor], salt: int) -> tuple[int, bytes]:
    """(digest of the tensors, or of parts of those that are large; elements of the first one).

    salt   which parts: others in each step, and the same in each process
    """
    state = xxhash.xxh3_64()
    sample = b""
    for tensor in tensors[:_MOST_TENSORS]:
        view = bytes_of(tensor)
        looked_at = view if len(view) <= WHOLE_BYTES else _lines(view, salt)
        state.update(looked_at)
        sample = sample or bytes(looked_at[:SAMPLE_BYTES])
    return state.intdigest(), sample


def _lines(view: memoryview, salt: int) -> memoryview:
    """Lines that are spread over all of it, the first words of each before the rest."""
    stride = len(view) // LINES // _WORD_BYTES * _WORD_BYTES
    at = salt * LINE_BYTES % (stride - LINE_BYTES + 1) // _WORD_BYTES * _WORD_BYTES
    array: Any = numpy.frombuffer(view, numpy.uint8, LINES * stride).reshape(LINES, stride)
    words = SAMPLE_BYTES // LINES
    lines = array[:, at : at + LINE_BYTES]
    return memoryview(lines[:, :words].tobytes() + lines[:, words:].tobytes())


def comparable(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among some values that can be looked at here."""
    return [
        one
        for one in values
        if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu"
    ]


def is_close(one: bytes, other: bytes, dtype: torch.dtype) -> bool:
    """Whether two samples differ by rounding alone, as what kernels give that add on several threads."""
    if not (dtype.is_floating_point and one) or len(one) != len(other) or len(one) % dtype.itemsize:
        return False
    here, there = (torch.frombuffer(bytearray(sample), dtype=dtype).double() for sample in (one, other))
    largest = max(here.abs().max().item(), there.abs().max().item())
    return bool(((here - there).abs() <= min(_ROUNDING * torch.finfo(dtype).eps, _MOST_ROUNDING) * largest).all())
