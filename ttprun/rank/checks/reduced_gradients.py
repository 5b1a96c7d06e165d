"""Look for NaN in reduced gradients: some elements at each step, all of them every WHOLE_EVERY steps.

A NaN of one rank is in the result of all. Whether it is this rank's own is seen in the journal's copy of the input, if
there is one. This serves `on_nan: warn`; `on_nan: stop` checks every input before the step (verification.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy
import torch

from ttprun.introspect import host_copies
from ttprun.introspect.tensor_bytes import bytes_of, elements_of

if TYPE_CHECKING:
    from ttprun.groups.entry import Entry
    from ttprun.groups.journal import Journal

WHOLE_EVERY = 16  # boundaries
MOST_OPERATIONS = 16  # of a step, unless all are checked
SAMPLE = 1024  # elements of each result
_REDUCING = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
        *("reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    }
)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_NUMPY = {torch.float32: "f4", torch.float64: "f8"}


Found = tuple[str, bool]  # where in the step's results a NaN is, "" if there is none; whether this rank's input had it


def find_nan(journal: Journal, boundary: int, later: Callable[[Found], None] | None = None) -> Found | None:
    """Where in the step's results a NaN was found; nothing, too, if it is another rank's.

    For when the step's collectives have completed.

    later   called with the answer with the next `host_copies.take`, if results are on a device; None is returned then
    """
    with journal.lock:
        entries = [entry for entry in journal.entries if entry.op in _REDUCING and entry.is_done]
    is_whole = boundary % WHOLE_EVERY == 0
    if not is_whole and len(entries) > MOST_OPERATIONS:
        first = boundary * MOST_OPERATIONS % len(entries)
        entries = (entries[first:] + entries[:first])[:MOST_OPERATIONS]
    on_device = [
        (entry, output)
        for entry in entries
        for output in entry.outputs
        if not output.is_cpu and output.is_floating_point()
    ]
    if not on_device or later is None:
        return _first(journal, entries, boundary, is_whole)
    answer = later

    def look(sums: list[torch.Tensor]) -> None:
        with_nan = {id(entry) for (entry, _), total in zip(on_device, sums, strict=True) if math.isnan(total)}
        suspects = [
            entry for entry in entries if id(entry) in with_nan or all(output.is_cpu for output in entry.outputs)
        ]
        answer(_first(journal, suspects, boundary, is_whole))

    host_copies.later([_sampled(output, boundary, is_whole).sum().float() for _, output in on_device], look)
    return None


def _first(journal: Journal, entries: list[Entry], boundary: int, is_whole: bool) -> Found:
    """Of some entries, the first whose results have a NaN."""
    for entry in entries:
        if any(has_nan(output, boundary, is_whole) for output in entry.outputs):
            return _whose(journal, entry)
    return "", False


def _sampled(tensor: torch.Tensor, boundary: int, is_whole: bool) -> torch.Tensor:
    """The elements that are checked."""
    elements = elements_of(tensor.detach())
    stride = elements.numel() // SAMPLE
    if stride > 1 and not is_whole:
        return elements.reshape(-1)[boundary % stride :: stride] if elements.is_contiguous() else elements[:1]
    return elements


def has_nan(tensor: torch.Tensor, boundary: int, is_whole: bool) -> bool:
    """Whether an element is NaN.

    tensor     any dtype, shape and device; one that is not floating has none
    boundary   says which elements are the sample of a large tensor
    is_whole   check all elements instead
    """
    if not tensor.is_floating_point():
        return False
    dtype = _OF_NUMPY.get(tensor.dtype)
    is_plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes > 0
    if dtype and is_plain and not is_whole:
        # Each of torch's operations takes longer than all of this: it is done for each bucket in each step.
        elements = numpy.frombuffer(bytes_of(tensor), dtype)
        stride = max(len(elements) // SAMPLE, 1)
        return bool(numpy.isnan(elements[boundary % stride :: stride]).any())
    sample = _sampled(tensor, boundary, is_whole)
    # The sum over infinities of both signs is NaN too, hence the second check.
    return math.isnan(sample.sum().item()) and bool(sample.isnan().any())


def _whose(journal: Journal, entry: Entry) -> Found:
    """See `find_nan`."""
    where = f"{entry.op} number {journal.entries.index(entry)} of the step"
    if not entry.input.tensors:
        return where, False
    for copy in entry.input.tensors:
        nans = int(elements_of(copy).isnan().sum())
        if nans:
            return f"{where}, {nans} of {copy.numel()} elements", True
    return "", False
