"""Tensors and arrays too large to be recorded each time: the replay makes them again, and they are compared.

A large tensor is hashed when it is first met (above TENSOR_BYTES only blocks spread over it, since batches are new at
each step). The hash is valid as long as it is the same tensor, at the same address, with the same version counter, and
its memory was not written. One that has changed since the previous boundary is not data that a replay would load again:
it is copied into the record.

If the kernel can report writes (written_pages.py), it is asked after a tensor or array has been met a few times.
Otherwise a few elements spread over a tensor are checked, since writes through `.data` are not counted; and an array,
which has no version counter, is hashed at each boundary: if it is too large for that, changes between the sampled
blocks are not noticed.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy
import torch
import xxhash

from ttprun.capture.values import written_pages
from ttprun.capture.values.written_pages import Watched, watch
from ttprun.introspect.looks import is_a
from ttprun.introspect.tensor_bytes import bytes_of, memory_of

SMALL_BYTES = 64 << 10  # up to here all elements are recorded
WHOLE_BYTES = 64 << 20  # up to here all bytes are hashed; of more, blocks that are spread over the whole
TENSOR_BYTES = 1 << 20  # the same for tensors, whose writes are counted: batches are hashed at each step
_BLOCKS = 8192
_TENSOR_BLOCKS = 2048
_BLOCK_BYTES = 256
_PROBES = 64
_LOOKS = 3  # boundaries at which it must have been unchanged before its memory is watched


class _Met:
    """What is known about one tensor or array, as of the newest boundary.

    looks    boundaries at which it was unchanged
    probe    elements spread over a tensor, which are compared while its memory is not watched
    watched  its memory; None if it is not watched
    """

    __slots__ = (
        *("at", "digest", "end", "is_changing", "looks", "probe", "reference", "values", "version", "watched"),
    )

    def __init__(self) -> None:
        self.looks = 0
        self.watched: Watched | None = None
        self.at = self.end = self.version = -1
        self.digest = self.values = b""
        self.is_changing = False
        self.probe: Any = None
        self.reference: Any = None

    def read_probe(self) -> bytes:
        """The sampled elements; only valid while its address is known."""
        found: bytes = self.probe.tobytes() if self.probe is not None else b""
        return found

    def is_as_it_was(self, at: int, size: int, version: int) -> bool:
        """Whether it is known to be unwritten, as far as can be seen."""
        if (version < 0 and self.watched is None) or (self.at, self.end, self.version) != (at, at + size, version):
            return False
        return self.values == self.read_probe() if self.watched is None else self.watched.is_untouched()

    def note_same(self, value: Any) -> None:
        """It was unchanged; after some such boundaries its memory is watched, and hashed once more."""
        self.looks += 1
        if self.looks == _LOOKS and not self.is_changing:
            self.watched = watch(self.at, self.end - self.at)
            if self.watched is not None:
                self.note_change(_digest(value) != self.digest)

    def begin_look(self, at: int, size: int) -> bool:
        """It is about to be hashed: later writes are new. Returns whether it has moved."""
        has_moved = (self.at, self.end) != (at, at + size)
        if has_moved:
            self.unwatch()
            self.at, self.end, self.looks = at, at + size, 0
        elif self.watched is not None:
            self.watched.note()
            if self.watched.is_over:  # its memory was mapped again
                self.unwatch()
                self.looks = 0
        return has_moved

    def note_change(self, has_changed: bool) -> None:
        """It was hashed; one that has ever changed is recorded each time, and need not be watched."""
        self.is_changing = self.is_changing or has_changed
        if self.is_changing:
            self.unwatch()

    def unwatch(self) -> None:
        """Stop watching its memory."""
        if self.watched is not None:
            self.watched.end()
            self.watched = None


_met: dict[int, _Met] = {}


def digest_of(view: memoryview) -> bytes:
    """A hash of all bytes, or of blocks spread over more than WHOLE_BYTES."""
    if view.nbytes <= WHOLE_BYTES:
        return xxhash.xxh3_64_digest(view)
    state = xxhash.xxh3_64(view[-_BLOCK_BYTES:])
    for at in range(0, view.nbytes, view.nbytes // _BLOCKS):
        state.update(view[at : at + _BLOCK_BYTES])
    return state.digest()


def fingerprint(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's elements, remembered while it is unchanged."""
    return follow(tensor)[0]


def follow(value: Any) -> tuple[bytes, bool]:
    """(hash of the elements, whether it has ever been changed between two boundaries) of a tensor or numpy array.

    An array has no version counter: one that can be written is hashed at each boundary unless its memory is watched.
    """
    is_tensor = is_a(value, torch.Tensor)
    size = value.nbytes
    if is_tensor and size <= SMALL_BYTES:
        return _digest(value), False
    at = address_of(value)
    version = _version_of(value)
    known = _met.get(id(value))
    is_known = known is not None and known.reference() is value
    if known is None or not is_known:
        known = _keep(value)
    elif known.is_as_it_was(at, size, version):
        if is_tensor and value.is_contiguous() and value.device.type == "cpu":
            known.note_same(value)
        return known.digest, known.is_changing
    if known.begin_look(at, size) and is_tensor:
        known.probe = _probe(value)
    digest = _digest(value)
    # Only blocks of a larger one were hashed, and something was written to it.
    is_written = size > TENSOR_BYTES if is_tensor else known.watched is not None and size > WHOLE_BYTES
    has_changed = digest != known.digest or is_written
    known.version, known.digest, known.values = version, digest, known.read_probe()
    if is_known:
        known.note_change(has_changed)
        if not (has_changed or is_tensor) and value.flags.forc:
            known.note_same(value)
    return digest, known.is_changing


def address_of(value: Any) -> int:
    """The address of a tensor or array."""
    at: int = value.data_ptr() if is_a(value, torch.Tensor) else value.__array_interface__["data"][0]
    return at


def _version_of(value: Any) -> int:
    """A counter that changes with each write, -1 if there is none; constant for a read-only array."""
    if is_a(value, torch.Tensor):
        return -1 if value.is_inference() else value._version
    return -1 if value.flags.writeable else 0


def is_followed(value: Any) -> bool:
    """Whether a tensor or array was met before."""
    known = _met.get(id(value))
    return known is not None and known.reference() is value


def array_around(address: int) -> Any:
    """The numpy array, of those that are followed, in whose memory an address lies; None if there is none."""
    around = (known.reference() for known in _met.values() if known.at <= address < known.end)
    return next((one for one in around if isinstance(one, numpy.ndarray)), None)


def forget() -> None:
    """The run of the script is over."""
    for known in _met.values():
        known.unwatch()
    _met.clear()
    written_pages.forget()


def _keep(value: Any) -> _Met:
    known = _Met()
    key = id(value)

    def forget(reference: Any) -> None:
        known.unwatch()
        if _met.get(key) is known:
            del _met[key]

    known.reference = weakref.ref(value, forget)
    _met[key] = known
    return known


def _digest(value: Any) -> bytes:
    if is_a(value, numpy.ndarray):
        return digest_of(numpy.ascontiguousarray(value).reshape(-1).view("u1").data)
    if value.nbytes <= SMALL_BYTES and value.is_cpu and value.is_contiguous():
        return digest_of(memoryview(memory_of(value))) if value.nbytes else b""
    flat = value.detach().resolve_conj().resolve_neg()
    if not (flat.is_contiguous() or flat.is_contiguous(memory_format=torch.channels_last)):
        flat = flat.contiguous()
    if not flat.is_cpu:
        if flat.nbytes > TENSOR_BYTES and flat.is_contiguous():
            return _digest_of_blocks_on_device(flat)
        flat = flat.cpu()
    if not flat.nbytes:
        return b""
    memory = _memory(flat.data_ptr(), flat.nbytes)
    return digest_of(memoryview(memory)) if flat.nbytes <= TENSOR_BYTES else _digest_of_blocks(memory)


def _digest_of_blocks(memory: Any) -> bytes:
    """A hash of blocks spread over memory that is larger than they are together, and of its end."""
    raw = numpy.frombuffer(memory, numpy.uint8)
    stride = len(raw) // _TENSOR_BLOCKS
    blocks = raw[: stride * _TENSOR_BLOCKS].reshape(_TENSOR_BLOCKS, stride)[:, :_BLOCK_BYTES]
    state = xxhash.xxh3_64(blocks.tobytes())
    state.update(raw[-_BLOCK_BYTES:].tobytes())
    return state.digest()


def _digest_of_blocks_on_device(flat: torch.Tensor) -> bytes:
    """As `_digest_of_blocks`; only the blocks are copied to the CPU."""
    raw = flat.view(-1).view(torch.uint8)
    stride = len(raw) // _TENSOR_BLOCKS
    blocks = raw[: stride * _TENSOR_BLOCKS].view(_TENSOR_BLOCKS, stride)[:, :_BLOCK_BYTES]
    state = xxhash.xxh3_64(bytes_of(blocks))
    state.update(bytes_of(raw[-_BLOCK_BYTES:]))
    return state.digest()


def _memory(at: int, size: int) -> Any:
    """Memory as a buffer, without numpy: a tensor on which numpy() was called cannot be resized any more."""
    return (ctypes.c_char * size).from_address(at)


def _probe(tensor: torch.Tensor) -> Any:
    """A view of elements spread over a tensor's memory, which it does not keep alive; None if that is impossible."""
    word = tensor.element_size()
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or word not in (1, 2, 4, 8):
        return None
    words = numpy.frombuffer(_memory(tensor.data_ptr(), tensor.nbytes), dtype=f"u{word}")
    return words[:: max(1, len(words) // _PROBES)]
