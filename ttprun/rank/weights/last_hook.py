"""The place of our hook before Optimizer.step: after the script's own ones, global and the optimizer's.

These belong to the step that the record closes. A hook of the script may print, reduce gradients or clip them, and what
it did after the record would be lost with its rank. torch calls the global hooks first and then the optimizer's, as the
values of a dictionary: ours is the last of these values, and no item, so that hooks may come and go meanwhile.
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
    """Called with a new optimizer, before the script can give it a hook: one that has some keeps them as they are."""
    if _last is not None and type(own := getattr(optimizer, _NAME, None)) is OrderedDict and not own:
        setattr(optimizer, _NAME, _HooksAndOurs())
