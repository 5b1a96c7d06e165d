"""Reasons in a record for which a replay would refuse it, found when it is written.

They are reported at the first step, while the user can still change the script, rather than when a rank is lost. Begin
with `look`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from ttprun.capture.records import recorder
from ttprun.capture.records.boundary_record import BoundaryRecord
from ttprun.introspect import distributed_tensors
from ttprun.protocol.reason import Reason
from ttprun.rank.session import Session
from ttprun.tensors import optimizer_registry

_MOST = 3  # variables that are named
_OTHER_WAYS = {"mpi4py.MPI": "MPI", "horovod.torch": "Horovod", "byteps.torch": "BytePS"}  # of communication


def look(record: BoundaryRecord, refused: list[Reason]) -> Reason:
    """Why no replay would reach this boundary; "" if one may.

    refused   what the rehearsal has found of this record or an older one
    """
    if why_never := recorder.why_never(record):
        return why_never
    if record.boundary > 1 and record.entropy:  # draws of the setup do not matter
        return Reason(
            "random-draws",
            "the script draws from os.urandom in its steps, which gives other numbers each time: seed a generator",
        )
    return in_short(refused)


def in_short(refused: list[Reason]) -> Reason:
    """The first few of some reasons, as one."""
    more = f"; and {len(refused) - _MOST} more" if len(refused) > _MOST else ""
    return refused[0].within("; ".join(map(str, refused[:_MOST])) + more) if refused else Reason()


def look_without_group(session: Session) -> None:
    """A step is taken without a group of ours: this rank trains alone, unless it communicates in another way."""
    if session.unprotected or session.framework is not None or session.world_size == 1:
        return
    why = _why_not_alone()
    if why:
        session.join()
        session.give_up_protection(why)
    else:
        session.part()


def _why_not_alone() -> Reason:
    """How this rank communicates without a group of ours; "" if it does not, as far as we know."""
    if dist.is_initialized():
        return Reason(
            "other-communication",
            "its process group was made by a reference to torch's function that is older than ttprun's hooks: call "
            "torch.distributed.init_process_group by that name",
        )
    if (module := next(filter(sys.modules.__contains__, _OTHER_WAYS), None)) is not None:
        return Reason(
            "other-communication",
            f"it communicates by {_OTHER_WAYS[module]}, which is not repaired: use torch.distributed",
        )
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and rpc.is_available() and rpc.api._is_current_rpc_agent_set():
        return Reason(
            "other-communication", "it communicates by torch.distributed.rpc, which is not repaired: use collectives"
        )
    return Reason()


def why_shards_unknown(optimizer: torch.optim.Optimizer) -> Reason:
    """Why the layout of this rank's shard of the weights or the optimizer's state is unknown; "" if it is known."""
    if any(map(distributed_tensors.is_gathered_in_place, optimizer_registry.parameters_of(optimizer))):
        return Reason(
            "sharding-unknown",
            "which part of FSDP1's parameters this rank holds is not known, as they are of a class of their own "
            "(DTensors): use torch's fully_shard (FSDP2)",
        )
    return Reason()
