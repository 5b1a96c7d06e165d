"""A tensor's elements as bytes, in place, to be hashed, recorded and sent.

What is large and on a device is hashed there: see `content_of`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
import torch

from ttprun.introspect.distributed_tensors import local_of


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a contiguous CPU tensor without conjugate or negative bit; itself if it is one."""
    if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a sparse one, the elements that it holds."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements, and of a sparse one's indices."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a strided tensor, in order; shares the memory of a contiguous CPU tensor.

    Without tensor.numpy(), after which torch does not allow the storage to be resized any more, as FSDP does.
    """
    flat = plain(tensor.detach()).contiguous()
    if not flat.numel():
        return memoryview(b"")
    buffer: Any = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    buffer.holds = flat
    array: Any = numpy.frombuffer(buffer, numpy.uint8)
    return memoryview(array)


FOLDED_FROM = 256 << 10  # bytes
_ROW = 8192  # words
_BLOCK = 512 * _ROW  # words that are multiplied at once: 32 MiB, twice
_WORDS = {1: torch.uint8, 2: torch.int16}  # by the bytes of an element; of longer ones their halves, and so on


def content_of(tensor: torch.Tensor) -> memoryview:
    """Bytes to hash instead of a strided tensor's elements: these, or for a large one on a device its `folded` rows.

    Two ranks that compare hashes have the tensor on devices of the same kind.
    """
    return bytes_of(tensor if tensor.is_cpu or tensor.nbytes < FOLDED_FROM else folded(tensor))


def folded(tensor: torch.Tensor) -> torch.Tensor:
    """The sums of each row of _ROW words of a tensor, each word times an odd number of its own, modulo 2**64.

    tensor   any strided tensor; its elements are read in order
    returns  int64, on the same device

    Sums of integers are the same in any order. Two different rows have the same sum by a chance of 2**-32 at the most:
    that of multilinear hashing (Carter and Wegman). Nothing is kept on the device, whose memory may fail.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    factors = _factors().to(flat.device)
    sums = []
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK]
        rest = block.numel() % _ROW
        if whole := block.numel() - rest:
            sums.append((block[:whole].view(-1, _ROW).to(torch.int64) * factors).sum(1))
        if rest:
            sums.append((block[whole:].to(torch.int64) * factors[:rest]).sum().view(1))
    return torch.cat(sums) if sums else words.to(torch.int64)


@cache
def _factors() -> torch.Tensor:
    """Odd numbers of 64 bits, the same everywhere (splitmix64)."""
    with numpy.errstate(over="ignore"):
        mixed = numpy.arange(1, _ROW + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        for shift, by in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(by)
    return torch.from_numpy((mixed | numpy.uint64(1)).view(numpy.int64))


def places(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Index in the sequence by the address of each tensor's storage, and of its first element.

    If tensors share a storage (parts of one flat buffer), its address maps to the first of them.

    tensors   any dtype, shape and device; of a DTensor the part that this rank holds counts
    """
    held = list(map(local_of, tensors))
    found: dict[int, int] = {}
    for at in ([one.untyped_storage().data_ptr() for one in held], [one.data_ptr() for one in held]):
        for index, address in enumerate(at):
            found.setdefault(address, index)
    return found
