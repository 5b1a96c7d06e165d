"""Tensors and arrays too large to be recorded each time: the replay makes them again, and they are compared.

A large tensor is hashed when it is first met. As long as it is the same tensor, at the same place, with the same
version counter, and a few elements spread over it are as they were (writes through `.data` are not counted), the hash
stands. One that has changed since the boundary before is no data that a replay would load again: it is copied into the
record. A numpy array has no version counter: of one that is too large to be hashed at each boundary the blocks between
those that are looked at can change unseen.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy
import torch
import xxhash

SMALL_BYTES = 64 << 10  # up to here all elements are recorded
WHOLE_BYTES = 64 << 20  # up to here all bytes are hashed; of more, blocks that are spread over the whole
_BLOCKS = 8192
_BLOCK_BYTES = 256
_PROBES = 64


class _Met:
    """What is known of one tensor or array: it was so at the newest boundary.

    node     of a tensor, as it was recorded last; [] if it must be made anew
    stepped  what optimizers updated then
    """

    __slots__ = ("at", "digest", "end", "is_changing", "node", "probe", "reference", "stepped", "values", "version")

    def __init__(self) -> None:
        self.node: list[Any] = []
        self.stepped: Any = None
        self.at = self.version = -1
        self.end = -1  # of an array
        self.digest = self.values = b""
        self.is_changing = False
        self.probe: Any = None
        self.reference: Any = None

    def read_probe(self) -> bytes:
        """The elements spread over it; only while it is known to live where it lived."""
        found: bytes = self.probe.tobytes() if self.probe is not None else b""
        return found


_met: dict[int, _Met] = {}
_arrays: dict[int, _Met] = {}


def digest_of(view: memoryview) -> bytes:
    """A hash of bytes, of all of them if they are not too many."""
    if view.nbytes <= WHOLE_BYTES:
        return xxhash.xxh3_64_digest(view)
    state = xxhash.xxh3_64(view[-_BLOCK_BYTES:])
    for at in range(0, view.nbytes, view.nbytes // _BLOCKS):
        state.update(view[at : at + _BLOCK_BYTES])
    return state.digest()


def fingerprint(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's elements; of a tensor that was met before and has not changed, the same as then."""
    return follow(tensor)[0]


def follow(tensor: torch.Tensor) -> tuple[bytes, bool]:
    """(hash of the elements, whether the tensor has ever been changed between two boundaries)."""
    if tensor.nbytes <= SMALL_BYTES:
        return _digest(tensor), False
    version = -1 if tensor.is_inference() else tensor._version
    at = tensor.data_ptr()
    known = _met.get(id(tensor))
    if known is not None and known.reference() is tensor:
        if known.at == at and known.version == version >= 0 and known.values == known.read_probe():
            return known.digest, known.is_changing
        known.node = []
        digest = _digest(tensor)
        known.is_changing = known.is_changing or digest != known.digest or tensor.nbytes > WHOLE_BYTES
    else:
        known = _keep(tensor, _met)
        digest = _digest(tensor)
    if known.at != at:
        known.at, known.probe = at, _probe(tensor)
    known.version, known.digest, known.values = version, digest, known.read_probe()
    return digest, known.is_changing


def node_as_before(tensor: torch.Tensor, stepped: Any) -> list[Any] | None:
    """The node that was kept of a tensor, if it is as it was then; None if it must be made anew.

    stepped   the storages that optimizers update: the very same object as long as these do not change
    """
    known = _met.get(id(tensor))
    if known is None or not known.node or known.stepped is not stepped or known.reference() is not tensor:
        return None
    is_same = known.at == tensor.data_ptr() and known.version == tensor._version
    return known.node if is_same and known.values == known.read_probe() else None


def keep_node(tensor: torch.Tensor, node: list[Any], stepped: Any) -> None:
    """Give a tensor that has just been followed the node that it has as long as nothing changes it."""
    known = _met[id(tensor)]
    known.node, known.stepped = node if known.version >= 0 else [], stepped


def follow_array(array: Any) -> tuple[bytes, bool]:
    """The same for a numpy array. It has no version counter: one that can be written is hashed each time."""
    known = _arrays.get(id(array))
    is_known = known is not None and known.reference() is array
    if known is None or not is_known:
        known = _keep(array, _arrays)
    elif not array.flags.writeable:
        return known.digest, False
    known.at = array.__array_interface__["data"][0]
    known.end = known.at + array.nbytes
    flat: Any = numpy.ascontiguousarray(array).reshape(-1).view("u1")
    digest = digest_of(memoryview(flat))
    known.is_changing = is_known and (known.is_changing or digest != known.digest)
    known.digest = digest
    return digest, known.is_changing


def is_followed(value: Any) -> bool:
    """Whether a tensor or array was met before."""
    known = (_met if isinstance(value, torch.Tensor) else _arrays).get(id(value))
    return known is not None and known.reference() is value


def array_around(address: int) -> Any:
    """The numpy array, of those that are followed, in whose memory an address lies; None if there is none."""
    return next((known.reference() for known in _arrays.values() if known.at <= address < known.end), None)


def _keep(value: Any, among: dict[int, _Met]) -> _Met:
    known = _Met()
    key = id(value)

    def forget(reference: Any) -> None:
        if among.get(key) is known:
            del among[key]

    known.reference = weakref.ref(value, forget)
    among[key] = known
    return known


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if flat.device.type != "cpu":
        flat = flat.cpu()
    return digest_of(memoryview(_memory(flat.data_ptr(), flat.nbytes))) if flat.nbytes else b""


def _memory(at: int, size: int) -> Any:
    """Memory as a buffer. Not by way of numpy: a tensor that numpy has seen cannot be resized any more."""
    return (ctypes.c_char * size).from_address(at)


def _probe(tensor: torch.Tensor) -> Any:
    """A view of elements spread over a tensor's memory, which it does not keep alive; None where there can be none."""
    word = tensor.element_size()
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or word not in (1, 2, 4, 8):
        return None
    words = numpy.frombuffer(_memory(tensor.data_ptr(), tensor.nbytes), dtype=f"u{word}")
    return words[:: max(1, len(words) // _PROBES)]
