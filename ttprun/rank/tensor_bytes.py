"""A tensor's elements as bytes, in place: what is hashed, recorded and sent."""

from __future__ import annotations

from typing import Any

import torch


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements lie in the CPU's memory one behind the other, as they are; itself if it is such a one."""
    if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a strided CPU tensor, in order; shares its memory if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
