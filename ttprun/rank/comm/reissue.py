"""The journal's collectives, issued again in a new generation: with which inputs, over which tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ttprun.rank.comm.journal import Entry
from ttprun.rank.comm.operations import OPERATIONS, tensors_in, with_tensors_replaced
from ttprun.rank.session import Session
from ttprun.rank.weights.replicated import NotRepairableError


def issue_again(session: Session, entry: Entry) -> Any:
    """Issue a journal entry in the present generation; returns the backend's work.

    An entry that has not completed gets its inputs back and works on the script's own tensors. One that has is only
    served to the others, on scratch copies: the script may have changed its tensors since. But if its result is given
    to the others, the giver sends the tensor that holds it.

    Raises NotRepairableError if its inputs are lost.
    """
    giver = session.journal.giver_of(entry)
    if not entry.is_done:
        if giver is None:
            _put_back(entry)
        return call_or_take(session, entry, entry.args)
    if giver == session.rank:
        return call_or_take(session, entry, entry.args)
    if giver is None and entry.held is not None:
        raise NotRepairableError(f"nobody has the input or the result of {entry.signature} any more")
    scratch = {}
    saved = {id(tensor): copy for tensor, copy in _saved_by_tensor(entry)}
    for tensor in tensors_in(entry.args):
        scratch[id(tensor)] = saved[id(tensor)].clone() if id(tensor) in saved else torch.empty_like(tensor)
    return call_or_take(session, entry, with_tensors_replaced(entry.args, scratch))


def call_or_take(session: Session, entry: Entry, args: tuple[Any, ...]) -> Any:
    """Issue an operation over these arguments, or a broadcast from the rank that has its result already."""
    giver = session.journal.giver_of(entry)
    if giver is None:
        return entry.group.call(entry.op, args)
    options = dist.BroadcastOptions()
    options.rootRank = entry.group.ranks.index(giver)
    return entry.group.call("broadcast", (args[0], options))


def _put_back(entry: Entry) -> None:
    if entry.held is not None:
        entry.held.put_back()
    for tensor, copy in entry.saved:
        tensor.copy_(copy)


def _saved_by_tensor(entry: Entry) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    inputs_at, _ = OPERATIONS[entry.op]
    if inputs_at is not None and entry.saved:
        yield from zip(tensors_in(entry.args[inputs_at]), (copy for _, copy in entry.saved), strict=True)
