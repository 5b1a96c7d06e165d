"""Whether a script can still go backward through a tensor that it keeps in a variable.

The graph of such a tensor is in no record. So if one is computed before a boundary, and the script calls backward on it
after that (`fake` of a GAN after the discriminator's step), no run can resume from the boundary (`unrecorded.py`
refuses it). That cannot be predicted exactly; but a backward() frees the tensors that a graph has saved, so if they are
still there, another one is likely to follow.
"""

from __future__ import annotations

from typing import Any

import torch

from ttprun import torch_versions
from ttprun.introspect.looks import of_types

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
    """Whether a tensor's graph is still kept for a backward().

    Unpacks nothing that torch.autograd.graph.saved_tensors_hooks has packed. False if nothing had to be saved (a sum of
    weights), since that cannot be seen.
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
            # A backward() has freed it: of `_, best = outputs.max(1)`, `_` is left, but no other backward() follows.
            return False
        is_kept = is_kept or keeps is True
        nodes += [before for before, _ in node.next_functions]
    return is_kept


@of_types
def _names_of_kept(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith(_KEPT)]


def _keeps(node: Any) -> bool | None:
    """Whether a node of the graph still keeps something, which is freed all at once; None if it never did."""
    for name in _names_of_kept(type(node)):
        try:
            value = getattr(node, name)
        except Exception:  # a torch.autograd.Function raises if it is freed; other kinds are unknown
            return False
        for part in value if isinstance(value, tuple | list) else (value,):
            if part is not None:
                is_kept = torch_versions.still_holds(node, name, part, _has_hooks)
                if is_kept is not None:
                    return is_kept
    return None
