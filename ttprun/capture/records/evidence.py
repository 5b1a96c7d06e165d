"""Evidence of the current step in shared memory, with which a replacement is compared (proof.py).

Under data parallelism, wrong state of one rank gives a wrong gradient, which reaches all ranks alike: comparing weights
never shows it. So each rank notes samples, before they are used, of the batches of its DataLoaders, of the losses on
which it calls backward, and of the inputs of its collectives. Begin with `Evidence.note`.

What replacements have come to where that differed is kept, too: if two of them differ, the script's arithmetic is not
reproducible.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from ttprun.introspect import host_copies
from ttprun.introspect.current_rank import BATCH
from ttprun.introspect.tensor_bytes import SAMPLE_BYTES, sampled, sampled_later

ENTRIES = 256  # of one step; later ones are not noted
ALWAYS = 4  # inputs of a group's collectives of one kind, from which on not all of a step are noted
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # odd, of 64 bits: see `Evidence.is_drawn`
_HEAD = struct.Struct("<qq")  # step, entries
_ENTRY = struct.Struct("<HHIQQ")  # kind, bytes of the sample, number, key, digest
_KIND, _NOT_YET = struct.Struct("<H"), 0xFFFF  # the first of it; of what is on a device, until it is there
_ENTRY_BYTES = _ENTRY.size + SAMPLE_BYTES
_STEP_BYTES = _HEAD.size + ENTRIES * _ENTRY_BYTES
_STEPS = 2  # a lost rank may be one step ahead of the boundary at which all resume
SNAPSHOTS = 2  # steps that follow a snapshot, with which ranks that go back to it are compared
_TRIED_AT = (_STEPS + SNAPSHOTS) * _STEP_BYTES
_TRIED_HEAD = struct.Struct("<qqq")  # whether this rank's arithmetic is not reproducible, step, entries
_TRIED = struct.Struct("<HxxIQQ")  # kind, number, key, digest
MOST_TRIED = 32
REGION_BYTES = _TRIED_AT + _TRIED_HEAD.size + MOST_TRIED * _TRIED.size

Place = tuple[int, int, int]  # kind, key of the loader or group, index among these in the step


def _ignore(copies: list[torch.Tensor]) -> None:
    """What is noted already, or finds no room."""


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
        self._counts: dict[tuple[int, int], int] = {}
        self._places: set[Place] = set()  # noted, of the step
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
        place = self.count(step, kind, name)
        return place, self.write(place, tensors)

    def count(self, step: int, kind: int, name: str) -> Place:
        """Count one batch, loss or input; returns its place in the step. The arguments are those of `note`."""
        if step != self._step:
            self._begin(step)
        if kind != BATCH and step != self._newest:
            self._apart = max(step - self._newest, 1) if self._newest >= 0 else 1
            self._newest = step
        counted = kind, _key_of(name)
        number = self._counts.get(counted, 0)
        self._counts[counted] = number + 1
        return (*counted, number)

    def write(self, place: Place, tensors: Sequence[torch.Tensor]) -> Noted:
        """Note what was counted last; see `note`."""
        kind, key, number = place
        noted = Noted(*sampled(tensors, self._step + number))
        if place not in self._places and self._count < ENTRIES:
            start = self._at + _HEAD.size + self._count * _ENTRY_BYTES
            sample = noted.sample
            _ENTRY.pack_into(self._region, start, kind, len(sample), number, key, noted.digest)
            self._region[start + _ENTRY.size : start + _ENTRY.size + len(sample)] = sample
            self._places |= {place}
            self._count += 1
            # last: a killed rank leaves complete entries
            _HEAD.pack_into(self._region, self._at, self._step, self._count)
        return noted

    def write_later(self, place: Place, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], host_copies.Use]:
        """As `write`, in two parts: what is to be copied to the CPU, and what notes the copies, in any thread."""
        kind, key, number = place
        at, step = self._at, self._step
        parts, finish = sampled_later(tensors, step + number)
        if place in self._places or self._count == ENTRIES:
            return parts, _ignore
        start = at + _HEAD.size + self._count * _ENTRY_BYTES
        _ENTRY.pack_into(self._region, start, _NOT_YET, 0, number, key, 0)
        self._places |= {place}
        self._count += 1
        _HEAD.pack_into(self._region, at, step, self._count)

        def write(copies: list[torch.Tensor]) -> None:
            digest, sample = finish(copies)
            if _HEAD.unpack_from(self._region, at)[0] != step:
                return
            _ENTRY.pack_into(self._region, start, _NOT_YET, len(sample), number, key, digest)
            self._region[start + _ENTRY.size : start + _ENTRY.size + len(sample)] = sample
            _KIND.pack_into(self._region, start, kind)  # last

        return parts, write

    def is_drawn(self, place: Place, is_weights: bool = False) -> bool:
        """Whether what was counted last is among those of the step that are noted, if there may be very many.

        The first ALWAYS of a kind and name are, of weights the first one, and of the others some that the step draws:
        in each process the same, in each step others, and the fewer the more there are.
        """
        _, key, number = place
        always = 1 if is_weights else ALWAYS
        if number < always:
            return True
        mixed = ((number * _FACTORS[0]) ^ (self._step * _FACTORS[1]) ^ key) * _FACTORS[2]
        return (mixed >> 32 & 0xFFFFFFFF) * (number + 1) >> 32 < always

    def is_likely(self, step: int) -> bool:
        """Whether a loss or an input will be noted of a step, if the script goes on as it has.

        Optimizers that step one after the other compute nothing in between.
        """
        return (step - self._newest) % self._apart == 0

    def _begin(self, step: int) -> None:
        self._step = step
        self._at = self._at_of(step)
        self._counts.clear()
        self._places = set()
        noted_step, count = _HEAD.unpack_from(self._region, self._at)
        self._count = count if noted_step == step else 0
        if noted_step != step:
            _HEAD.pack_into(self._region, self._at, step, 0)
        elif count:
            self._places.update(self.left(step))

    def left(self, step: int) -> dict[Place, Noted]:
        """What this rank's processes have noted of a step."""
        at = self._at_of(step)
        noted_step, count = _HEAD.unpack_from(self._region, at)
        notes = {}
        for entry in range(count if noted_step == step else 0):
            start = at + _HEAD.size + entry * _ENTRY_BYTES
            kind, size, number, key, digest = _ENTRY.unpack_from(self._region, start)
            if kind == _NOT_YET:
                continue
            sample = bytes(self._region[start + _ENTRY.size : start + _ENTRY.size + size])
            notes[kind, key, number] = Noted(digest, sample)
        return notes

    # What replacements have come to.

    @property
    def is_noisy(self) -> bool:
        """Whether processes of this rank have come to other bits from the same state."""
        return bool(_TRIED_HEAD.unpack_from(self._region, _TRIED_AT)[0])

    def tried(self, step: int, place: Place) -> list[int]:
        """The digests of what older replacements have come to at a place, where that was not the lost rank's."""
        _, tried_step, count = _TRIED_HEAD.unpack_from(self._region, _TRIED_AT)
        start = _TRIED_AT + _TRIED_HEAD.size
        entries = (_TRIED.unpack_from(self._region, start + at * _TRIED.size) for at in range(count))
        return [digest for kind, number, key, digest in entries if (tried_step, kind, key, number) == (step, *place)]

    def note_tried(self, step: int, place: Place, noted: Noted) -> bool:
        """A replacement has come to something else than the lost rank; False if there is no room for more."""
        noisy, tried_step, count = _TRIED_HEAD.unpack_from(self._region, _TRIED_AT)
        count = count if tried_step == step else 0
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
