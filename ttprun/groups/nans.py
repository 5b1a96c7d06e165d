"""NaNs in what a rank gives to a collective."""

from __future__ import annotations

import math

import torch

from ttprun.introspect.tensor_bytes import elements_of


def nans_in(tensor: torch.Tensor) -> int:
    """The number of elements that are NaN."""
    tensor = elements_of(tensor)
    # The sum over infinities of both signs is NaN too, hence the count.
    if tensor.is_floating_point() and math.isnan(tensor.sum().item()):
        return int(tensor.isnan().sum())
    return 0
