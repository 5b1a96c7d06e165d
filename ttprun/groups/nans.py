"""NaNs in what a rank gives to a collective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ttprun.introspect.tensor_bytes import elements_of

if TYPE_CHECKING:
    from ttprun.groups.entry import Entry


def look_for_nan(entry: Entry) -> None:
    """Note the NaNs in an issued collective's inputs: the journal's copies, or the gradients in a bucket."""
    if entry.held is not None:
        entry.nan = entry.held.count_nans()
        return
    for _, copy in entry.saved:
        nans = nans_in(copy)
        if nans:
            entry.nan = f"{nans} of {copy.numel()} elements"
            return


def nans_in(tensor: torch.Tensor) -> int:
    """The number of elements that are NaN."""
    tensor = elements_of(tensor)
    # The sum over infinities of both signs is NaN too, hence the count.
    if tensor.is_floating_point() and math.isnan(tensor.sum().item()):
        return int(tensor.isnan().sum())
    return 0
