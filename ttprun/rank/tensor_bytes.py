"""A tensor's elements as bytes, in place: what is hashed, recorded and sent."""

from __future__ import annotations

from typing import Any

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a strided CPU tensor, in order; shares its memory if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
