"""Whether a script can still go backward through a tensor that it keeps in a variable.

What such a tensor was computed from is in no record. So a boundary in front of which one was computed, and behind
which the script goes backward through it (`fake` of a GAN behind the discriminator's step), is none that a run can go
on from (`unrecorded.py` refuses it). That cannot be foreseen for sure; but a backward() frees what a graph has kept,
and through a graph whose tensors are still there another one is likely to come.
"""

from __future__ import annotations

from typing import Any

import torch

from ttprun import torch_versions
from ttprun.rank.values.unchanged import of_types

_MOST_NODES = 256
_KEPT = "_raw_saved_"
_has_hooks = False


def wrap_saved_tensors_hooks(original: Any) -> Any:
    """saved_tensors_hooks.__enter__: from now on unpacking a saved tensor may run code of the script."""

    def enter(self: Any) -> Any:
        global _has_hooks
        _has_hooks = True
        return original(self)

    return enter


def is_awaited(tensor: torch.Tensor) -> bool:
    """Whether what a tensor was computed from is still kept for a backward().

    Only looks: what was packed by torch.autograd.graph.saved_tensors_hooks stays so. False where nothing had to be kept
    (a sum of weights), since it cannot be seen then.
    """
    nodes = [tensor.grad_fn]
    met: set[Any] = set()
    is_kept = False
    while nodes and len(met) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        keeps = _keeps(node)
        if keeps is False:
            # A backward() has been here: of `_, best = outputs.max(1)` that leaves `_`, but none comes again.
            return False
        is_kept = is_kept or keeps is True
        nodes += [before for before, _ in node.next_functions]
    return is_kept


@of_types
def _names_of_kept(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith(_KEPT)]


def _keeps(node: Any) -> bool | None:
    """Whether a node of the graph still keeps something, which is freed all at once; None if it never did."""
    keeps = None
    for name in _names_of_kept(type(node)):
        try:
            value = getattr(node, name)
        except Exception:  # a torch.autograd.Function raises when it is freed; of any other kind nothing is known
            return False
        for one in value if isinstance(value, tuple | list) else (value,):
            if one is not None:
                held = torch_versions.still_holds(node, name, one, _has_hooks)
                if held:
                    return True
                keeps = False if held is False else keeps
    return keeps
