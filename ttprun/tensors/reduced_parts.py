"""What this rank has got from FSDP2's reduce-scatters since the newest boundary, in shared memory of the node.

A replacement with a mirror takes these results instead of taking part in the operations again, so that the other ranks
need not keep what they had put into them: whole gradients. Begin with `ReducedParts.keep` and `ReducedParts.take`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
import xxhash

from ttprun.tensors.memory import Memory

# Boundary, hash of the sequence, number in it, offset, bytes; boundary 0: it is not valid.
_RECORD = struct.Struct("<5q")
_MOST = 4096  # operations of one step
_BEGIN = _MOST * _RECORD.size
_ALIGNED = 64  # bytes
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
        self._write(at, _NOTHING)
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
        return at, offset + -(-size // _ALIGNED) * _ALIGNED

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
