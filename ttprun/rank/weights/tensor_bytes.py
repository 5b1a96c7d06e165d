"""A tensor's elements as bytes, in place, to be hashed, recorded and sent."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import torch


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
