"""How a collective is issued: the first time by STAGES, and again in a new generation (`issue_again`).

Each collective of a `ManagedGroup` goes through the stages, in their order. Begin with STAGES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ttprun.device import accelerator
from ttprun.groups import thread_collectives, waits
from ttprun.groups.journal import SMALL_RESULT_BYTES, Journal
from ttprun.groups.operations import (
    GATHERING,
    OPERATIONS,
    REDUCING,
    Completed,
    Entry,
    Input,
    KeptInput,
    tensors_in,
    with_options,
    with_tensors_replaced,
)
from ttprun.groups.results import Results, place_of
from ttprun.groups.work import ManagedWork
from ttprun.introspect import model_tensors, stages
from ttprun.introspect.current_rank import INPUT, Rank
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.ownership import location_key
from ttprun.introspect.stages import Stage
from ttprun.introspect.tensor_bytes import bytes_of, sampled, sampled_later
from ttprun.protocol.board import OPERATION_NAMES, Phase
from ttprun.protocol.reason import Reason

OPERATION_NUMBERS = {op: OPERATION_NAMES.index(op) for op in OPERATIONS}
_LARGE = SMALL_RESULT_BYTES + 1


class Call:
    """A collective that the script issues, for the stages.

    group        a ManagedGroup
    entry        in its journal
    inputs_at    the argument that holds this rank's inputs; None: there is none
    outputs_at   the argument that holds the outputs; None: there is none
    is_apart     it is another thread's own
    is_skipped   an injected fault leaves it out
    is_kept      a recovery would issue it again
    caller       FSDP2's frame that gathers or reduces by it; None: no such
    is_lent      nobody writes to its inputs until they are freed
    result       of the collective, once a stage has ended it
    """

    __slots__ = (
        "caller",
        "entry",
        "group",
        "inputs_at",
        "is_apart",
        "is_kept",
        "is_lent",
        "is_skipped",
        "outputs_at",
        "result",
        "session",
    )

    def __init__(self, session: Rank, group: Any, entry: Entry) -> None:
        self.session = session
        self.group = group
        self.entry = entry
        self.inputs_at, self.outputs_at = OPERATIONS[entry.op]
        self.is_apart = self.is_skipped = self.is_lent = False
        self.is_kept = True
        self.caller: Any = None
        self.result: Any = None


def _leave_to_backend(call: Call) -> bool:
    """Tensors on a device: leave those that are not repaired to the backend alone."""
    device, group, session = call.entry.outputs[0].device, call.group, call.session
    if not group.is_repaired(device.type):
        call.result = group.issue_unprotected(call.entry.op, call.entry.args, device)
        return True
    if accelerator.is_capturing():
        session.give_up_protection(
            Reason(
                "device-graph",
                f"the script captures {call.entry.op} in a graph of the device, which cannot be repeated",
            )
        )
    return False


def _announce(call: Call) -> None:
    """Note whether it is another thread's own; if not, an injected fault may leave it out, and the board shows it."""
    entry, group = call.entry, call.group
    call.is_apart = is_apart = not group.threads.is_of_main and group.threads.look(entry)
    if is_apart:
        return
    if stages.listeners:
        given = () if call.inputs_at is None else entry.args[call.inputs_at]
        call.is_skipped = stages.reached_collective(entry.op, given)
    if not call.is_skipped:
        call.session.meet(OPERATION_NUMBERS[entry.op], group.links.member.size)


def _hand_over(call: Call) -> bool:
    """Others take it over: torch, where nothing is protected on a device any more; or the script's framework."""
    session, entry = call.session, call.entry
    if session.unprotected.text and not call.is_skipped and session.mode.is_live and call.group.is_late(entry.args):
        # On a device all is as under torch then, whose works know streams and graphs better than ours.
        call.result = call.group.links.issue_plainly(entry.op, entry.args)
        session.touch(Phase.COMPUTING)
        return True
    if session.framework is not None:
        call.result = session.framework.issue(entry, call.is_skipped)
        return True
    return False


def _answer(call: Call) -> bool:
    """Note where a small result will be found again; in a replay, answer it by the lost rank's result."""
    session, entry, is_apart = call.session, call.entry, call.is_apart
    outputs = entry.outputs
    is_on_host = not outputs or outputs[0].is_cpu
    call.is_kept = session.is_repairable()
    if entry.op in GATHERING:
        call.caller, call.is_lent = model_tensors.fsdp_caller()
        entry.is_passing = call.caller is not None
    if call.is_kept and not entry.is_passing and (is_on_host or not is_apart):
        size_bytes = 0
        for output in outputs:
            size_bytes += output.nbytes if output.layout is torch.strided else _LARGE
        if size_bytes < _LARGE:
            _note_place(call)
    if call.is_skipped or session.mode.is_alone or is_apart:
        entry.is_done = thread_collectives.is_answered(session, entry) if is_apart else session.mode.answer(entry)
    if entry.is_done:
        call.result = ManagedWork(session.parts[Journal], entry)
    return entry.is_done


def _note_place(call: Call) -> None:
    entry = call.entry
    entry.place = place_of(entry.op, entry.outputs, location_key())
    if call.is_apart:
        entry.place = "" if entry.save else f"{entry.place} in a thread of step {entry.begun}"
    if entry.outputs and not entry.outputs[0].is_cpu:
        entry.stream = accelerator.current_stream()


def _expect(call: Call) -> None:
    """A replacement issues what the survivors have issued; a collective in an optimizer's step is noted."""
    session = call.session
    if session.is_applying and not call.is_apart:
        session.note_collective_step()
    if session.expected is not None:
        session.expected.check(call.entry)


def _issue(call: Call) -> None:
    """Compare its inputs with the lost rank's, and issue it: see `ManagedGroup.enter`."""
    entry, group, session = call.entry, call.group, call.session
    op, outputs = entry.op, entry.outputs
    if call.inputs_at is None or (op == "broadcast" and group.is_receiver(entry.args)):
        inputs = []
    else:
        inputs = outputs if call.inputs_at == call.outputs_at else tensors_in(entry.args[call.inputs_at])
    unusual = []
    for tensor in outputs if inputs is outputs else (*outputs, *inputs):
        if tensor.layout is not torch.strided:
            unusual.append(tensor)
    if unusual and not (op == "allreduce" and unusual[0].layout is torch.sparse_coo):
        session.give_up_protection(
            Reason(
                "messages-not-repaired", f"the script's {op} takes sparse tensors: only all_reduce of these is repaired"
            )
        )
    if inputs and not (unusual or call.is_apart):
        is_weights = entry.is_passing and op not in REDUCING
        name = f"{group.links.member.name} {with_options(op, entry.args)}"
        session.observers.note(INPUT, name, inputs, op, is_one_of_many=True, is_weights=is_weights)
        if call.is_lent and call.is_kept and op in REDUCING:
            entry.input = Input([tensor.detach() for tensor in inputs], is_borrowed=True)
        elif call.is_lent and call.is_kept and call.caller is not None:
            group.gathers.hold(entry, inputs[0], model_tensors.gathered_by(call.caller))
        elif op == "allreduce" and call.is_kept and session.parts[Journal].unsettled:
            _follow_reduction(session, entry)
    if call.is_apart and entry.place and not unusual:
        session.parts[Results].note_issued(entry, inputs)
    if session.keeper is not None and call.caller is not None and op in REDUCING:
        entry.parameters = model_tensors.gathered_by(call.caller)
    call.is_kept = group.enter(entry, inputs)
    if call.caller is not None and call.is_kept and group.links.is_late and not group.links.needs_stop:
        entry.is_read_later = waits.is_read_later(entry, call.caller)


def _follow_reduction(session: Rank, entry: Entry) -> None:
    """HSDP reduces the result of a reduction over the copies of the model: what the mirror has is not copied again."""
    before, output = session.parts[Journal].unsettled[-1], entry.outputs[0]
    if before.outputs[0] is not output:
        return
    entry.reduces_again = True
    if before.kept_version == output._version:  # nothing was added to it since
        give, name, number = session.observers.give_result, before.sequence, before.number
        entry.input = KeptInput(lambda tensor: give(session.applied, name, number, tensor), output)


def _look(call: Call) -> None:
    """Look for NaN in the inputs, if that stops the job."""
    if call.is_kept and call.session.options.nan_limit_s is not None:
        call.group.buckets.look_for_nan(call.entry)
    if stages.listeners and not call.is_apart:
        stages.reached("collective")


STAGES: tuple[Stage[Call], ...] = (
    Stage(
        "device",
        _leave_to_backend,
        "first: what is left to the backend is in no journal, and its rank is not one that others miss",
    ),
    Stage(
        "announce",
        _announce,
        "before anything may wait or end the process: a rank that hangs from here on is named by this collective",
    ),
    Stage(
        "hand over", _hand_over, "after it is announced, whoever issues it; before anything of it is kept or compared"
    ),
    Stage(
        "answer",
        _answer,
        "before it is compared with what survivors have issued: what a replay answers is older than all that",
    ),
    Stage("expect", _expect, "before it is issued: what survivors have not issued must reach none of them"),
    Stage(
        "issue",
        _issue,
        "after the comparison: the inputs of another collective say nothing, and would be taken for a contradiction",
    ),
    Stage("look", _look, "last: all ranks wait for the operation meanwhile, and this thread is idle"),
)
ON_HOST = STAGES[1:]  # without outputs on a device


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
        return entry.batch.issue() if entry.batch else call_or_take(session, entry, entry.args_again())
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
        # Nobody reads the result that an empty one takes; of a tensor that was dropped, it is where that was.
        scratch[id(tensor)] = (
            saved[id(tensor)].clone()
            if id(tensor) in saved
            else torch.empty_like(tensor, device=entry.device if tensor.is_meta else None)
        )
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
        return Completed()
    if session[Journal].has_arrived(entry):
        return Completed()
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


class Message(Entry):
    """A send or a receive.

    members   global ranks: sender, receiver
    batch     with which it is started; None: alone
    """

    sends_copy = True
    sequence = ""
    signature = ""
    members: Sequence[int] = ()
    _digest = ""
    _received: Any = None  # parts of what has come on a device, and what makes a digest of their copies

    def __init__(self, group: Any, op: str, args: tuple[Any, ...], batch: Any = None) -> None:
        (tensor,), peer, tag = args
        self.batch = batch
        super().__init__(group, op, args, [tensor] if op == "recv" else [])
        ends = (group.rank(), peer) if op == "send" else (peer, group.rank())
        self.members = [group.ranks[end] for end in ends]
        # NCCL and HCCL have no tags: a pair's messages come in the order in which they are issued.
        way = f"tag {tag}" if tensor.is_cpu else f"on {tensor.device.type}{', in batches' if batch else ''}"
        self.sequence = f"{group.group_name}: {self.members[0]} to {self.members[1]}, {way}"
        self.signature = f"message of {tensor.nbytes} bytes"
        self.device = tensor.device
        self._bytes = tensor.nbytes
        if not tensor.is_cpu:
            self.stream = accelerator.current_stream()

    def digest_of(self, tensor: torch.Tensor) -> str:
        """A digest of its content, by which the sender and the receiver compare it: 16 hexadecimal digits.

        tensor   sent or received; dense, any dtype, shape and device
        """
        return f"{sampled((tensor.detach(),), self.number)[0]:016x}"

    def digest(self) -> str:
        """As in Entry; of what has come on a device it is made here, for which that is waited for."""
        if self._received is not None:
            parts, finish = self._received
            accelerator.wait_on(self.ready)
            self._received, self._digest = None, f"{finish([part.cpu() for part in parts])[0]:016x}"
        return self._digest

    def send_copy(self) -> None:
        """As in Entry: the script may change its tensor."""
        if self.input.tensors:
            self.args = (self.input.tensors, *self.args[1:])

    def note_result(self) -> None:
        """It has completed; the script does not know yet."""
        if self.outputs and self.outputs[0].is_cpu:
            self._digest = self.digest_of(self.outputs[0])
        elif self.outputs:
            with accelerator.on(self.stream):  # that may write to it next
                self._received = sampled_later([self.outputs[0].detach()], self.number)
                self.ready = accelerator.mark()

    def release(self) -> None:
        """What was received is the script's alone."""
        if self.outputs:
            self.outputs = []
            self.args = ([], *self.args[1:])

    def args_again(self) -> tuple[Any, ...]:
        """The arguments to issue it in another generation; on scratch tensors, if it has completed here."""
        if not self.is_done:
            return self.args
        scratch = [tensor.clone() for tensor in self.args[0]]
        scratch = scratch or [torch.empty(self._bytes, dtype=torch.uint8, device=self.device)]
        return (scratch, *self.args[1:])
