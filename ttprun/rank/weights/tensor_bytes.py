"""A tensor's elements as bytes, in place: what is hashed, recorded and sent."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import torch


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements lie in the CPU's memory one behind the other, as they are; itself if it is such a one."""
    if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a sparse one, the elements that it holds."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def size_of(tensor: torch.Tensor) -> int:
    """Bytes that it takes, of a sparse one too."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a strided tensor, in order; shares its memory if that is contiguous and the CPU's.

    Not by tensor.numpy(), behind which torch lets nobody resize the tensor's storage any more, as FSDP does.
    """
    flat = plain(tensor.detach()).contiguous()
    if not flat.numel():
        return memoryview(b"")
    buffer: Any = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    buffer.holds = flat
    array: Any = numpy.frombuffer(buffer, numpy.uint8)
    return memoryview(array)
