"""What torch itself calls and keeps of process groups: its registry, a group's names and device, the operations.

Sends and receives between two ranks (`issue_message`): after a fault both ends issue their messages since the boundary
again. What a living rank has received is not sent to it again: it has reported a digest of each such message, and the
sender, or its replacement, leaves these out. The replacement's are compared with the digests first: if one differs, it
does not repeat the lost rank. A replacement that receives gets everything again, from the copies in the sender's
journal.

Read `operation` first: all_reduce and the like enter a group there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work

from ttprun.device import accelerator
from ttprun.groups.collectives import Message
from ttprun.groups.journal import SMALL_RESULT_BYTES, Journal
from ttprun.groups.operations import BATCH, Completed, positional
from ttprun.groups.work import LOSES_WORKS, ManagedWork, Refused, hold, is_called_by_python
from ttprun.introspect import fail_open, stages
from ttprun.introspect.current_rank import INPUT, Rank
from ttprun.introspect.ownership import calls_key
from ttprun.introspect.signal_handlers import gate_from_c
from ttprun.protocol.board import OPERATION_NAMES
from ttprun.protocol.reason import Reason

if TYPE_CHECKING:
    from ttprun.groups.links import Links

# torch's registry of process groups, restored if making a managed group fails.


class GroupRegistry:
    """torch's registry of groups at one moment; `restore` removes the groups made since.

    They are kept alive: a store in them may serve the other ranks.
    """

    _removed: list[Any] = []  # noqa: RUF012 - of the process

    def __init__(self) -> None:
        self._default = c10d._world.default_pg
        self._count = c10d._world.group_count
        self._hook = sys.excepthook  # init_process_group installs its own, which prefixes the rank
        self._tables = [(table, _copy(table)) for table in _tables()]

    def restore(self) -> None:
        """Remove the groups that were made since."""
        names = set(c10d._world.pg_names.values())
        for table, content in self._tables:
            GroupRegistry._removed.append(_copy(table))
            table.clear()
            table.update(content) if isinstance(table, dict) else table.extend(content)
        c10d._world.group_count = self._count
        c10d._update_default_pg(self._default)
        sys.excepthook = self._hook
        for name in names - set(c10d._world.pg_names.values()):
            with contextlib.suppress(RuntimeError):  # it was not registered yet
                torch._C._distributed_c10d._unregister_process_group(name)


def _tables() -> list[Any]:
    """The dictionaries and lists of torch's `_World`, which vary by version."""
    kind = type(c10d._world)
    names = [name for name, member in vars(kind).items() if isinstance(member, property) and name != "pg_config_info"]
    tables = [getattr(c10d._world, name) for name in names]
    return [table for table in tables if isinstance(table, dict | list)]


def _copy(table: Any) -> Any:
    if isinstance(table, dict):
        return {key: list(value) if isinstance(value, list) else value for key, value in table.items()}
    return list(table)


# What torch asks of a process group beside its operations: its names, and the device that it is bound to.

INTERNAL_NAME = "ttprun"  # not "gloo": C++ would look for a native gloo backend in the group


class SeenByTorch(ProcessGroup):
    """That part of a `ManagedGroup`."""

    _name: str
    _description: str
    links: Links

    def getBackendName(self) -> str:
        return INTERNAL_NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        self.links.rename(name)

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc  # type: ignore[assignment]
    group_desc = property(getGroupDesc)

    _n_being_made = 0

    @staticmethod
    @contextlib.contextmanager
    def making() -> Iterator[None]:
        """The script makes a group: torch would split its communicator off a bound device's."""
        SeenByTorch._n_being_made += 1
        try:
            yield
        finally:
            SeenByTorch._n_being_made -= 1

    @property  # type: ignore[misc]
    def bound_device_id(self) -> torch.device | None:
        """The device that the script has given, as torch's own group has it."""
        member = self.links.member
        return member.device if member.is_given and not SeenByTorch._n_being_made else None


def operation(op: str) -> Callable[..., Any]:
    """The method for a collective. It returns what torch's own group would: a work, or None."""

    @gate_from_c
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = positional(op, args, kwargs)
        gives_work = not self.links.is_late or self.links.gives_work(given)
        work: Any = fail_open.run(op, self.issue, self.links.issue_plainly, (op, given), {})
        # C++ code takes a None that a Python group returns for a work.
        if not gives_work and work is not None and is_called_by_python(sys._getframe(2), op):
            work.wait()
            return None
        return hold(work) if LOSES_WORKS and isinstance(work, ManagedWork) else work

    call.__name__ = op
    return call


def point_to_point(op: str) -> Callable[..., Any]:
    """The method for a message between two ranks."""

    @gate_from_c
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.batch is not None:
            return self.batch.add(op, (*args, *kwargs.values()))
        issue = partial(issue_message, self.session, self)
        return fail_open.run(op, issue, self.links.issue_plainly, (op, (*args, *kwargs.values())), {})

    call.__name__ = op
    return call


# Messages.

_NUMBERS = {op: OPERATION_NAMES.index(op) for op in ("send", "recv")}
_MISSED_BY_NONE = 0  # as `Rank.meet` counts ranks: a message is between two of them


def issue_message(session: Rank, group: Any, op: str, args: tuple[Any, ...]) -> Any:
    """Write a send or a receive to the journal, and issue it; returns its work.

    op     "send", "recv" or "recv_anysource"
    args   the backend's: ([tensor], peer's rank in the group, tag), without the peer for "recv_anysource"

    Raises MismatchError if a replacement sends something else than the lost rank, after reporting it to the agent.
    """
    tensor = args[0][0]
    if op == "recv_anysource" or not _may_repair(session, group, tensor.device):
        return _pass_on(session, group, op, args, tensor)
    is_skipped = stages.reached_collective(op, args[0] if op == "send" else ())
    if not is_skipped:
        session.meet(_NUMBERS[op], _MISSED_BY_NONE)
    if session.unprotected.text and not (is_skipped or tensor.is_cpu) and session.mode.is_live:
        return group.links.issue_plainly(op, args)  # as for collectives
    message = Message(group, op, args)
    group.messages.add((message.members[0], message.members[1]))
    if session.framework is not None:
        return session.framework.issue(message, is_skipped)
    if not _is_answered(session, message, is_skipped):
        group.enter(message, [tensor] if op == "send" else [])
        stages.reached("collective")
    return ManagedWork(session[Journal], message)


def _is_answered(session: Rank, message: Message, is_skipped: bool) -> bool:
    """Whether a message is over before it is issued, as in a replay; else it is numbered and compared.

    is_skipped   an injected fault leaves it out

    Raises as `issue_message`.
    """
    tensor = message.args[0][0]
    if message.outputs and tensor.nbytes <= SMALL_RESULT_BYTES and session.is_repairable():
        message.place = f"{message.sequence} {calls_key()}"
    if is_skipped or session.mode.is_alone:
        session.mode.answer(message)
        message.is_done = True
        return True
    if session.is_applying:
        session.note_collective_step()
    message.number = session[Journal].number_of(message)
    if session.expected is not None:
        session.expected.check(message)
    # What is equal to rounding alone is not sent again to whoever has received it.
    if message.op == "send" and not session.observers.note(INPUT, message.sequence, [tensor], message.op):
        _compare_with_received(session, message, tensor)
    return False


def _may_repair(session: Rank, group: Any, device: torch.device) -> bool:
    """Whether messages of tensors there are repaired; not while they are captured in a graph of the device."""
    if device.type == "cpu":
        return True
    return session.framework is None and group.is_repaired(device.type) and not accelerator.is_capturing()


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


# Operations that the script starts together, on a device.

_Orders = list[tuple[str, tuple[Any, ...]]]


class Batch:
    """Messages that are started together, and again in a new generation: one operation of the backend.

    messages   in the order of the script
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.messages: list[Message] = []
        self._newest: tuple[int, Any] = (-1, None)  # generation of the connection, and the backend's work on it

    def issue(self) -> Any:
        """Issue them on the current connection, if that was not done, without those that have arrived.

        Returns the backend's work of all. Raises its error.
        """
        group = self._group
        generation, journal = group.links.member.generation, group.session[Journal]
        if self._newest[0] != generation:
            left = [message for message in self.messages if not journal.has_arrived(message)]
            orders = [(message.op, message.args_again()) for message in left]
            self._newest = generation, group.call(BATCH, (orders,)) if orders else Completed()
        return self._newest[1]

    def begin(self) -> Any:
        """Issue them the first time; as `ManagedGroup` does an operation. Raises the backend's error as that does."""
        session = self._group.session
        try:
            return self.issue()
        except Exception as error:
            diagnosis = session.diagnose(error)
            if diagnosis.is_known and diagnosis.can_wait and session.is_repairable():
                ready = accelerator.mark()
                for message in self.messages:
                    message.ready = message.ready or ready
                return Refused(error)
            for message in self.messages:
                session[Journal].drop(message)
            raise


class WorkOfAll(Work):
    """The work of operations that are started together: done when each of them is."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all have really completed; `timeout` is the backend's own."""
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all have completed."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """As is_completed()."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """What has come of all, in their order."""
        return [output for work in self._works for output in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of that."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self.result())


def issue_batch(group: Any, orders: _Orders) -> Any:
    """Write messages on a device to the journal, and start them together; returns their work.

    orders   (operation, its arguments) of each; not empty

    Raises as `issue_message`.
    """
    session, device = group.session, orders[0][1][0][0].device
    if accelerator.is_capturing():
        session.give_up_protection(
            Reason("device-graph", "the script captures messages in a graph of the device, which cannot be repeated")
        )
    skipped = [stages.reached_collective(op, args[0] if op == "send" else ()) for op, args in orders]
    if not all(skipped):
        session.meet(_NUMBERS[orders[0][0]], _MISSED_BY_NONE)
    if session.framework is not None or not group.is_repaired(device.type):
        what = f"operations on {device.type} together (batch_isend_irecv, or a coalescing manager)"
        session.give_up_protection(Reason("messages-not-repaired", f"the script starts {what}, which is not repaired"))
    if session.mode.is_live and session.unprotected.text:
        return issue_batch_plainly(group, orders)
    batch = Batch(group)
    messages = [Message(group, op, args, batch) for op, args in orders]
    group.messages.update((message.members[0], message.members[1]) for message in messages)
    batch.messages = [
        message
        for message, is_skipped in zip(messages, skipped, strict=True)
        if not _is_answered(session, message, is_skipped)
    ]
    if batch.messages:
        group.enter_together(batch.messages, batch.begin)
        stages.reached("collective")
    return WorkOfAll([ManagedWork(session[Journal], message) for message in messages])


def issue_batch_plainly(group: Any, orders: _Orders) -> Any:
    """Start messages together as torch does; returns their work."""
    return group.links.issue_plainly(BATCH, (orders,))


class Coalesced:
    """What the script starts together within torch's `_coalescing_manager`.

    Collectives are issued one by one, in the order of the script: the backend's own order. Messages wait for the end,
    as two ranks that send to each other would wait for ever.

    is_issuing   the group issues one of them
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._works: list[Any] = []
        self._orders: _Orders = []
        self.is_issuing = False
        session = group.session
        self._link = group.links.of(device.type) if session.mode.is_live and session.unprotected.text else None
        if self._link is not None:  # as under torch
            self._link.begin_batch(device)

    def issue(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue a collective; returns its work."""
        if self._link is not None:
            return self._link.issue_plainly(op, args)
        self.is_issuing = True
        try:
            self._works.append(work := self._group.issue(op, args))
        finally:
            self.is_issuing = False
        return work

    def add(self, op: str, args: tuple[Any, ...]) -> Any:
        """A message; returns what torch does."""
        if self._link is not None:
            return self._link.issue_plainly(op, args)
        self._orders.append((op, args))
        return None

    def end(self) -> Any:
        """Start the messages; returns the work of all."""
        group = self._group
        if self._link is not None:
            return self._link.end_batch(self._device)
        if self._orders:
            self._works.append(
                fail_open.run("coalesced messages", issue_batch, issue_batch_plainly, (group, self._orders), {})
            )
        return WorkOfAll([work for work in self._works if work is not None])
