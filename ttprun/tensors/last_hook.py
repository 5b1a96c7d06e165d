"""Call our pre-hook of Optimizer.step after the script's own ones, global and the optimizer's.

A hook of the script may print, or reduce or clip gradients; what it did after our record would be lost with its rank.
torch calls the global hooks first and then the optimizer's, as the values of a dictionary: ours is appended to these
values, without being an item.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

_NAME = "_optimizer_step_pre_hooks"
_last: Any = None


class _HooksAndOurs(OrderedDict[int, Any]):
    """An optimizer's own hooks before its step."""

    def values(self) -> Any:
        return [*super().values(), _last]


def after_all_others(hook: Any) -> Any:
    """The global hook to register, for `hook` to be called last."""
    global _last
    _last = hook

    def place(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if type(getattr(optimizer, _NAME, None)) is _HooksAndOurs else hook(optimizer, args, kwargs)

    return place


def make_place(optimizer: torch.optim.Optimizer) -> None:
    """Called with a new optimizer, before the script can add hooks; one that has some already is left as it is."""
    if _last is not None and type(own := getattr(optimizer, _NAME, None)) is OrderedDict and not own:
        setattr(optimizer, _NAME, _HooksAndOurs())
