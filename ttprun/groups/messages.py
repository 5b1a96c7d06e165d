"""Sends and receives between two ranks of a group: what the journal keeps of them, and how they are issued.

After a fault both ends issue their messages since the boundary again. What a living rank has received is not sent to it
again: it has reported a digest of each such message, and the sender, or its replacement, leaves these out. The
replacement's are compared with the digests first: if one differs, it does not repeat the lost rank. A replacement that
receives gets everything again, from the copies in the sender's journal.

Begin with `issue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ttprun.groups.journal import SMALL_RESULT_BYTES, Journal
from ttprun.groups.operations import Entry
from ttprun.groups.work import ManagedWork
from ttprun.introspect import fault_points
from ttprun.introspect.current_rank import INPUT, Rank
from ttprun.introspect.frames import calls_key
from ttprun.introspect.tensor_bytes import sampled
from ttprun.protocol.board import OPERATION_NAMES
from ttprun.protocol.reason import Reason

_NUMBERS = {op: OPERATION_NAMES.index(op) for op in ("send", "recv")}
_MISSED_BY_NONE = 0  # as `Member.meet` counts ranks: a message is between two of them


class Message(Entry):
    """A send or a receive.

    members   global ranks: sender, receiver
    """

    sends_copy = True
    sequence = ""
    signature = ""
    members: Sequence[int] = ()

    def __init__(self, group: Any, op: str, args: tuple[Any, ...]) -> None:
        (tensor,), peer, tag = args
        super().__init__(group, op, args, [tensor] if op == "recv" else [])
        ends = (group.rank(), peer) if op == "send" else (peer, group.rank())
        self.members = [group.ranks[end] for end in ends]
        self.sequence = f"{group.group_name}: {self.members[0]} to {self.members[1]}, tag {tag}"
        self.signature = f"message of {tensor.nbytes} bytes"
        self._bytes = tensor.nbytes

    def digest_of(self, tensor: torch.Tensor) -> str:
        """A digest of its content, by which the sender and the receiver compare it: 16 hexadecimal digits.

        tensor   sent or received; dense, any dtype, shape and device
        """
        return f"{sampled((tensor.detach(),), self.number)[0]:016x}"

    def send_copy(self) -> None:
        """As in Entry: the script may change its tensor."""
        if self.input.tensors:
            self.args = (self.input.tensors, *self.args[1:])

    def note_result(self) -> None:
        """It has completed; the script does not know yet."""
        if self.outputs:
            self.digest = self.digest_of(self.outputs[0])

    def release(self) -> None:
        """What was received is the script's alone."""
        if self.outputs:
            self.outputs = []
            self.args = ([], *self.args[1:])

    def args_again(self) -> tuple[Any, ...]:
        """The arguments to issue it in another generation; on scratch tensors, if it has completed here."""
        if not self.is_done:
            return self.args
        scratch = [tensor.clone() for tensor in self.args[0]] or [torch.empty(self._bytes, dtype=torch.uint8)]
        return (scratch, *self.args[1:])


def issue(session: Rank, group: Any, op: str, args: tuple[Any, ...]) -> Any:
    """Write a send or a receive to the journal, and issue it; returns its work.

    op     "send", "recv" or "recv_anysource"
    args   the backend's: ([tensor], peer's rank in the group, tag), without the peer for "recv_anysource"

    Raises MismatchError if a replacement sends something else than the lost rank, after reporting it to the agent.
    """
    journal = session[Journal]
    tensor = args[0][0]
    if op == "recv_anysource" or not tensor.is_cpu:
        return _pass_on(session, group, op, args, tensor)
    is_skipped = fault_points.reached_collective(op, args[0] if op == "send" else ())
    if not is_skipped:
        session.meet(_NUMBERS[op], _MISSED_BY_NONE)
    message = Message(group, op, args)
    group.messages.add((message.members[0], message.members[1]))
    if session.framework is not None:
        return session.framework.issue(message, is_skipped)
    if message.outputs and tensor.nbytes <= SMALL_RESULT_BYTES and session.is_repairable():
        message.place = f"{message.sequence} {calls_key()}"
    if is_skipped or session.mode.is_alone:
        session.mode.answer(message)
        message.is_done = True
        return ManagedWork(journal, message)
    if session.is_applying:
        session.note_collective_step()
    message.number = journal.number_of(message)
    if session.expected is not None:
        session.expected.check(message)
    # What is equal to rounding alone is not sent again to whoever has received it.
    if op == "send" and not session.observers.note(INPUT, message.sequence, [tensor], op):
        _compare_with_received(session, message, tensor)
    group.enter(message, [tensor] if op == "send" else [])
    fault_points.reached("collective")
    return ManagedWork(journal, message)


def _pass_on(session: Rank, group: Any, op: str, args: tuple[Any, ...], tensor: torch.Tensor) -> Any:
    """Leave to the backend what is not repaired."""
    if session.framework is None:
        what = f"{op} of tensors on {tensor.device.type}"
        if tensor.is_cpu:
            what = "recv without src (which rank sends is not known before: name it)"
        session.give_up_protection(Reason("messages-not-repaired", f"the script uses {what}, which is not repaired"))
    if not session.mode.is_live:
        raise RuntimeError(f"{op} cannot be replayed")
    return group.links.issue_plainly(op, args)


def _compare_with_received(session: Rank, message: Message, tensor: torch.Tensor) -> None:
    """A replacement repeats what the lost rank has sent: compare it with what has come of that."""
    digests = session[Journal].received.get(message.sequence, ())
    if message.number >= len(digests) or digests[message.number] == message.digest_of(tensor):
        return
    difference = (
        f"the replacement sends something else to rank {message.members[1]} than what this has received from the lost "
        f"rank (number {message.number + 1} of the step)"
    )
    session.observers.sends_otherwise(tensor, difference)
