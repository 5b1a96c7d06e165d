"""The original parameters of FSDP1 (`use_orig_params=True`), which the optimizer has in place of flat ones.

At a boundary each is a view of this rank's part of its flat parameter: as much of it as lies there, perhaps nothing. It
is the whole while a script gathers parameters to look at or to save them (`summon_full_params`, a full `state_dict`).
Then the part is still there, in the flat parameter. Begin with `part_of`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

# id of a parameter -> flat parameter, index there, whether each rank has the whole
_known: dict[int, tuple[weakref.ref[Any], int, bool]] = {}


def wrap_init(original: Any) -> Any:
    """FlatParamHandle.__init__: note of which flat parameter the original ones are parts."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        flat = getattr(self, "flat_param", None)
        for at, parameter in enumerate(getattr(flat, "_params", None) or ()):
            if type(parameter) is torch.nn.Parameter:
                _known[id(parameter)] = weakref.ref(flat), at, not self.uses_sharded_strategy

    return init


def part_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of an original parameter; None if it is none.

    returns  one dimension, as many elements as this rank has, in the flat parameter's memory; the parameter itself
             where each rank has the whole (NO_SHARD), and before the first forward pass
    """
    known = _known.get(id(parameter))
    if known is None:
        return None
    of_flat, at, is_whole = known
    flat = of_flat()
    if flat is None or id(flat._params[at]) != id(parameter):  # another one with the id of one that is gone
        return None
    held = getattr(flat, "_local_shard", None)
    if is_whole or held is None:
        return parameter
    info = flat._shard_param_infos[at]
    begin, size = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
    part: torch.Tensor = held[begin : begin + size]
    return part


def forget() -> None:
    """The run of the script is over."""
    _known.clear()
