"""Issue the journal's operations again in a new generation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ttprun.device import accelerator
from ttprun.groups.journal import SMALL_RESULT_BYTES, Journal
from ttprun.groups.messages import Message
from ttprun.groups.operations import Entry, tensors_in, with_tensors_replaced
from ttprun.groups.work import Delivered
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.tensor_bytes import bytes_of
from ttprun.protocol.reason import Reason


@torch.no_grad()  # on the recovery thread, as the script does in its own: outputs may be parameters
def issue_again(session: Rank, entry: Entry) -> Any:
    """Issue a journal entry in the current generation; returns the backend's work.

    A pending entry gets its inputs back and works on the script's own tensors. A completed one is issued for the other
    ranks alone, on scratch copies, since the script may have changed its tensors. If a rank has the result, all others
    get that instead: what the replacement would put in may differ by rounding from what the lost rank had put in.

    Raises NotRepairableError if its inputs are lost.
    """
    if entry.ready is not None:
        accelerator.wait_on(entry.ready)
    if isinstance(entry, Message):
        return call_or_take(session, entry, entry.args_again())
    if session[Journal].is_settled(entry):
        return call_or_take(session, entry, entry.args)
    if entry.is_settled:
        raise NotRepairableError(
            Reason("input-lost", f"the input of {entry.signature} is dropped, as all ranks had completed it")
        )
    source = session[Journal].source_of(entry)
    if not entry.is_done:
        if source is None:
            entry.input.put_back(entry.own_inputs)
        return call_or_take(session, entry, entry.args)
    if source is not None:
        return call_or_take(session, entry, entry.args)
    scratch = {}
    again = entry.input.made_again()
    saved = {id(tensor): copy for tensor, copy in zip(entry.own_inputs, again, strict=bool(again))}
    for tensor in tensors_in(entry.args):
        scratch[id(tensor)] = saved[id(tensor)].clone() if id(tensor) in saved else _empty_like(tensor)
    return call_or_take(session, entry, with_tensors_replaced(entry.args, scratch))


def call_or_take(session: Rank, entry: Entry, args: tuple[Any, ...]) -> Any:
    """Issue an operation with these arguments, or a broadcast from the rank that has its result.

    args      the entry's, or the same with scratch tensors
    returns   the backend's work

    A message that has arrived is not issued at all, nor a collective that all members had completed: a replacement has
    its result in its mirror.

    Raises NotRepairableError if the mirror does not have it, or the backend's error.
    """
    if session[Journal].is_settled(entry):
        if not entry.is_done:
            session.observers.give_result(session.applied, entry.sequence, entry.number, entry.outputs[0])
        return Delivered()
    if session[Journal].has_arrived(entry):
        return Delivered()
    source, entry.given = session[Journal].source_of(entry), None
    if source is None:
        return entry.group.call(entry.op, args)
    options = dist.BroadcastOptions()
    options.rootRank = entry.group.ranks.index(source)
    return entry.group.call("broadcast", ([_to_give_or_take(entry, source == session.rank)], options))


@torch.no_grad()
def _to_give_or_take(entry: Entry, is_source: bool) -> torch.Tensor:
    """The tensor that is broadcast in place of an operation.

    Small results are sent as one tensor of their bytes, which `unpack_given` takes apart. The large one of a bucket of
    DistributedDataParallel is sent as it is; what has completed here gets memory that nobody reads.
    """
    size = sum(output.nbytes for output in entry.outputs)
    if size > SMALL_RESULT_BYTES:
        (output,) = entry.outputs
        return torch.empty_like(output) if entry.is_done and not is_source else output
    device = entry.outputs[0].device
    if is_source:
        parts = (part if isinstance(part, bytes) else bytes_of(part) for part in entry.result or ())
        joined = bytearray(b"".join(parts))
        return torch.frombuffer(joined, dtype=torch.uint8).to(device) if joined else torch.empty(0, dtype=torch.uint8)
    given = torch.empty(size, dtype=torch.uint8, device=device)
    if not entry.is_done:
        entry.given = given
    return given


@torch.no_grad()
def unpack_given(entry: Entry) -> None:
    """Another rank's result has come in place of an operation: it becomes this rank's."""
    if entry.given is None:
        return
    rest = entry.given
    for output in entry.outputs:
        given, rest = rest[: output.nbytes], rest[output.nbytes :]
        if not output.nbytes:
            continue
        output.copy_(torch.frombuffer(bytearray(bytes_of(given)), dtype=output.dtype).view(output.shape))
    entry.given = None


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a result that nobody reads; of a tensor that was dropped, on the CPU."""
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else torch.empty_like(tensor)
