"""What would keep a replay from coming to a boundary, found when the boundary is recorded.

These are the reasons for which a replay refuses a record, whatever happens in the replay itself. So they are reported
at the first step, while somebody is there to change the script, and not when a rank is lost. Begin with `look`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ttprun.rank import values
from ttprun.rank.session import Session

_MOST = 3  # variables that are named
_OTHER_WAYS = {"mpi4py.MPI": "MPI", "horovod.torch": "Horovod", "byteps.torch": "BytePS"}  # by which ranks meet


def look(record: dict[str, Any], head: bytes) -> str:
    """Why no replay would come to this boundary; "" if one may.

    head   the record, packed
    """
    unfollowed: str = record["unfollowed"]
    if unfollowed:
        return unfollowed
    if record["boundary"] > 1 and record["entropy"]:  # those of the set-up do not matter
        return "the script draws from os.urandom in its steps, and other numbers come out each time: seed a generator"
    if values.MARK_OF_REFUSED not in head:
        return ""
    try:
        found = values.refusals(head)
    except Exception:  # ours: a replay will find out
        return ""
    more = f", and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more


def look_without_group(session: Session) -> None:
    """A step is taken, and none of our groups is there: this rank trains alone, unless it has others by other ways."""
    if session.unprotected or session.framework is not None or session.world_size == 1:
        return
    why = _why_not_alone()
    if why:
        session.join()
        session.give_up_protection(why)
    else:
        session.part()


def _why_not_alone() -> str:
    """How this rank has to do with others, though none of our groups is there; "" if we know of nothing."""
    if dist.is_initialized():
        return (
            "its process group was made by a function of torch's that somebody had taken before ttprun came: import "
            "torch.distributed, and call init_process_group from there"
        )
    if (found := next(filter(sys.modules.__contains__, _OTHER_WAYS), None)) is not None:
        return f"it trains without a process group of torch's, but with {_OTHER_WAYS[found]}, which is not repaired"
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and rpc.is_available() and rpc.api._is_current_rpc_agent_set():
        return "it has to do with other ranks by torch.distributed.rpc, which is not repaired"
    return ""


def why_shards_unknown(optimizer: torch.optim.Optimizer) -> str:
    """Why each rank holds a part of its own of the weights or of the optimizer's state, and which is not known."""
    kinds = {(kind.__module__, kind.__qualname__) for kind in type(optimizer).__mro__}
    if ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer") in kinds:
        return "with ZeroRedundancyOptimizer each rank keeps a part of the optimizer's state that no other rank has"
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        return "FSDP1 shards the parameters in a way that is not stored: use torch's fully_shard (FSDP2)"
    return ""
