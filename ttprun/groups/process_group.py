"""The process group that the script gets instead of torch's: the same calls, over a backend that can be replaced.

`ManagedGroup` is a Python subclass of `torch.distributed.ProcessGroup`, so DDP's reducer, functional collectives and
the Python API all use it. Each call is written to the journal and issued on the current generation's connection. The
work objects are ours: when the connection breaks during an operation, `wait()` keeps waiting until the recovery has
issued the operation again, and futures stay pending. A survivor's main thread never sees an exception.

`operations.py` lists the operations, and which of their arguments are inputs and outputs; `links.py` makes and ends the
connections.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ttprun.device import accelerator
from ttprun.groups import thread_collectives, torch_calls
from ttprun.groups.collectives import ON_HOST, STAGES, Call, call_or_take, unpack_given
from ttprun.groups.connection import Exchange, GroupMember
from ttprun.groups.gathers import Gathers
from ttprun.groups.inputs import Buckets
from ttprun.groups.journal import EndedError, Journal
from ttprun.groups.links import TRANSPORTS, Links
from ttprun.groups.operations import (
    EXCHANGING,
    OPERATIONS,
    POINT_TO_POINT,
    Entry,
    NotHeld,
    tensors_in,
)
from ttprun.groups.results import Results
from ttprun.groups.torch_calls import SeenByTorch
from ttprun.groups.work import ManagedWork, Refused
from ttprun.introspect import fail_open, signal_handlers
from ttprun.introspect.costs import COLLECTIVES
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.ownership import waits_for_recovery
from ttprun.protocol import from_rank
from ttprun.protocol.reason import Reason

signal_handlers.Now.is_in_engine = lambda: torch._C._current_graph_task_id() != -1
living: weakref.WeakSet[ManagedGroup] = weakref.WeakSet()  # including those that the script has destroyed
_SETTLED_AFTER = 16  # steps, until when it is known which ranks have replicas
GLOO_ALONE: Mapping[str, str] = {"cpu": "gloo"}


class ManagedGroup(SeenByTorch):
    """A process group whose connection can be replaced without the script noticing.

    session        of this process
    ranks          global ranks of the members
    rank           of this process among them
    op_limit       the time-out that the script asked for
    backends       type of device -> name of the backend for its tensors, as torch would have chosen it
    options        of the backend, as the script has given them; None: torch's own
    device         as the script has given it (`device_id`); None: it has not
    number         groups are numbered in the order in which the script makes them
    is_made        torch has finished making it
    links          its connections
    buckets        inputs that need no copy, of DistributedDataParallel
    gathers        the same, of FSDP2
    threads        whose its operations are
    batch          of operations that the script is starting together
    """

    def __init__(
        self,
        session: Rank,
        exchange: Exchange,
        name: str,
        ranks: list[int],
        rank: int,
        op_limit: timedelta,
        backends: Mapping[str, str] = GLOO_ALONE,
        options: Any = None,
        device: Any = None,
    ) -> None:
        size = len(ranks)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.ranks = ranks
        self.backends = backends
        self.session = session
        self._name = name
        # A script may destroy its groups and make new ones: torch reuses the names then, maybe for other ranks.
        self._of_these = f"{name} of {','.join(map(str, ranks))}"
        session.made.by_ranks[self._of_these] += 1
        key = self._key_of(session.made.by_ranks)
        self.number = session.made.count = session.made.count + 1
        self.is_made = False
        self.buckets = Buckets(self)
        self.gathers = Gathers()
        self.batch: Any = None
        self._description, self._exchanges = "", False
        self.threads = thread_collectives.ThreadsOfGroup()
        self.messages: set[tuple[int, int]] = set()
        self._rank, self._size = rank, size
        is_given = device is not None
        member = GroupMember(exchange, -1, key, name, rank, size, ranks, op_limit, options, device, is_given)
        self.links = Links(session, member, backends)
        session.made.living[name] = self
        living.add(self)

    def _key_of(self, made: Mapping[str, int]) -> str:
        return f"{self._of_these}#{made[self._of_these]}"

    def count_as(self, made: Mapping[str, int]) -> None:
        """It is the newest of its name and ranks, of which so many were made; it has no connection yet."""
        if self._of_these in made:
            self.links.member = dataclasses.replace(self.links.member, key=self._key_of(made))

    def described(self) -> from_rank.Group:
        """Its members, and the dimension of the mesh that has made it: torch's meshes describe it as mesh_NAME."""
        _, _, dimension = self._description.partition("mesh_")
        return from_rank.Group(dimension, self.ranks, self._exchanges, [list(pair) for pair in sorted(self.messages)])

    def shutdown(self) -> None:
        """The script has destroyed the group."""
        if self.session.made.living.get(self._name) is self:
            self.session.made.forget([self._name])
        self.links.close()

    def abort(self) -> None:
        """The script aborts the group: pending operations fail."""
        self.links.cut()
        self.shutdown()

    # Connections.

    @property
    def backend_name(self) -> str:
        """As `dist.get_backend` shows it."""
        return ",".join(dict.fromkeys(self.backends.values()))

    def is_protected(self) -> bool:
        """Whether a recovery would issue this group's operations again."""
        return not self.session.unprotected

    def connect_if_new(self) -> None:
        """Connect a group that was made after a recovery. Raises RuntimeError if a member is away."""
        if not self.links.all and self.session.made.living.get(self._name) is self:
            away = sorted(self.session.away & {*self.ranks})
            if away:
                raise RuntimeError(
                    f"process group {self._name!r} includes rank {', '.join(map(str, away))}, which is away: use a "
                    "group of the remaining ranks, made by the downgrade_rebuild handler"
                )
            self.links.connect()

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of the backends that torch would have registered; DCP's async_save asks for them.

        Empty while torch is making the group: torch 2.15 would attach its flight recorder to a native backend. And
        while a recovery has no connection: torch_npu's `stop_device` calls the backends of all groups.
        """
        is_away = not self.links.all and self.links.member.generation >= 0
        return [torch.device(device_type) for device_type in self.backends] if self.is_made and not is_away else []

    def _get_backend(self, device: torch.device) -> Any:
        """The native backend that serves a device now; torch 2.15 asks for its capabilities.

        In a replay there is none: memory that a script's set-up registers is not, which changes no result.
        """
        link = self.links.of(device.type)
        if link is None and self.is_made and device.type in self.backends:
            return SimpleNamespace(register_mem_pool=lambda *_, **__: None, deregister_mem_pool=lambda *_, **__: None)
        return link.backend if link is not None and self.is_made else super()._get_backend(device)

    # Operations.

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; the agent reports which rank is missing."""
        options = dist.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        self.issue("barrier", (options,)).wait()

    def can_batch(self, device: torch.device) -> bool:
        """Whether the device's backend can start several operations together.

        Asked before it is connected, too: in a recovery, and in a replay.
        """
        link, name = self.links.of(device.type), self.backends.get(device.type)
        if link is None:
            return name is not None and TRANSPORTS[name].is_late
        return link.is_late and bool(getattr(link.backend, "supports_coalescing", False))

    def _start_coalescing(self, device: torch.device) -> None:
        """The script's operations up to `_end_coalescing` are to be started together."""
        if not self.can_batch(device):
            raise RuntimeError(f"backend {self.backend_name!r} does not start operations of {device.type} together")
        self.batch = torch_calls.Coalesced(self, device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """Start them; returns the work of all."""
        batch, self.batch = self.batch, None
        return batch.end()

    def issue(self, op: str, args: tuple[Any, ...]) -> Any:
        """Write a collective to the journal and issue it; every collective comes here. What is done: STAGES."""
        if self.batch is not None and not self.batch.is_issuing:
            return self.batch.issue(op, args)
        session = self.session
        costs = session.costs
        since = costs.now() if costs.is_on else 0
        if op in EXCHANGING:
            self._exchanges |= signal_handlers.Now.is_in_engine()
        outputs_at = OPERATIONS[op][1]
        outputs = [] if outputs_at is None else tensors_in(args[outputs_at])
        call = Call(session, self, entry := Entry(self, op, args, outputs))
        for _, act, _ in ON_HOST if not outputs or outputs[0].is_cpu else STAGES:
            if act(call):
                return call.result
        if since:
            costs.add(COLLECTIVES, since)
        return ManagedWork(session.parts[Journal], entry)

    @waits_for_recovery
    def enter(self, entry: Entry, inputs: list[torch.Tensor]) -> bool:
        """Write an operation to the journal, if it can be repaired, and issue it; returns whether it is kept.

        While the journal is frozen, the recovery's thread issues it. Raises EndedError once the script's run is over.

        inputs   of the operation that this rank gives, [] if it only receives
        """
        session = self.session
        journal, is_late = session.parts[Journal], self.links.is_late
        if session.keeper is not None:
            session.keeper.issue(entry, inputs)
        while True:
            if is_late:
                self.links.make_ready(entry.args)
            with journal.lock:
                if is_late and not (journal.is_frozen or self.links.is_ready(entry.args)):
                    continue  # a recovery has begun, and ended: connect again, without the lock
                is_kept = session.is_repairable() and self._keep(entry, inputs)
                if journal.is_frozen or (is_late and (self.links.needs_stop or not journal.has_own())):
                    entry.ready = accelerator.mark()  # another thread may issue it, on another stream: also `settle`
                if is_kept or journal.is_frozen:
                    journal.entries.append(entry)
                    journal.note_order(entry)
                if not journal.is_frozen:
                    entry.inner = self._begin(entry)
                elif journal.is_ended:
                    raise EndedError
                if is_kept and entry.sends_copy:
                    entry.send_copy()
                break
        if is_late:
            self.links.check_repairable()
        return is_kept

    @waits_for_recovery
    def enter_together(self, messages: Sequence[Entry], begin: Callable[[], Any]) -> None:
        """As `enter`, of messages on a device that are started together.

        begin   starts them; returns the work of all
        """
        session = self.session
        journal, args = session.parts[Journal], ([tensors_in(messages[0].args)[0]],)
        while True:
            self.links.make_ready(args)
            with journal.lock:
                if not (journal.is_frozen or self.links.is_ready(args)):
                    continue
                is_kept = session.is_repairable() and all(
                    self._keep(message, [] if message.outputs else message.args[0]) for message in messages
                )
                if journal.is_frozen or self.links.needs_stop or not journal.has_own():
                    ready = accelerator.mark()
                    for message in messages:
                        message.ready = ready
                if is_kept or journal.is_frozen:
                    journal.entries += messages
                    for message in messages:
                        journal.note_order(message)
                if not journal.is_frozen:
                    inner = begin()
                    for message in messages:
                        message.inner = inner
                elif journal.is_ended:
                    raise EndedError
                if is_kept:
                    for message in messages:
                        message.send_copy()
                break
        self.links.check_repairable()

    def _keep(self, entry: Entry, inputs: list[torch.Tensor]) -> bool:
        """Copy or note the inputs; if the journal's limit is reached, protection ends: False.

        Not in the first steps on a device, until it is known what the script leaves free there; nor for FSDP2's
        reductions, until it is known whether results are mirrored: then their inputs are dropped as soon as all members
        have completed them. A rank that is lost in such a step is refused.
        """
        if self.buckets.hold(entry):
            return True
        session, journal = self.session, self.session.parts[Journal]
        if self.links.is_late:
            journal.follows_device = journal.may_follow_device
        if not journal.save(entry, inputs):
            is_open = session.applied < _SETTLED_AFTER and (entry.is_soon_dropped or entry.reduces_again)
            if journal.has_learnt and not is_open:
                session.give_up_protection(journal.why_full)
                return False
            entry.input = NotHeld((), entry.input.is_borrowed)
        return True

    def end_step(self) -> None:
        """The step is committed, nothing of it will be issued again. Not called during a backward pass."""
        self.buckets.end_step()
        self.gathers.end_step()

    def forget_run(self) -> None:
        """The script's run is over: hold none of its tensors, in which memory may have failed."""
        self.buckets, self.gathers = Buckets(self), Gathers()

    def is_repaired(self, device_type: str) -> bool:
        """Whether operations on tensors of this device are repaired."""
        name = self.backends.get(device_type)
        return self.session.framework is not None or (name is not None and device_type in TRANSPORTS[name].device_types)

    def issue_unprotected(self, op: str, args: tuple[Any, ...], device: torch.device) -> dist.Work:
        """Leave tensors on a device to gloo alone: its works and futures know the device's streams, ours do not."""
        self.session.give_up_protection(
            Reason(
                "backend",
                f"collectives of tensors on {device.type} are not repaired with the backend {self.backend_name!r}",
            )
        )
        if (connection := self.links.by_gloo) is not None:
            connection.serve(device.type)
        work: dist.Work = self.call(op, args)
        return work

    def is_late(self, args: tuple[Any, ...]) -> bool:
        """Whether the backend that carries these arguments is waited for on a device."""
        return bool(self.links.all) and self.links.that_carries(args).is_late

    def _begin(self, entry: Entry) -> Any:
        """Issue an operation of the journal. Raises the backend's error if no recovery would help."""
        try:
            journal = self.session.parts[Journal]
            if not (journal.sources or journal.received or journal.settled):
                return self.call(entry.op, entry.args)
            return call_or_take(self.session, entry, entry.args)
        except Exception as error:
            diagnosis = self.session.diagnose(error)
            if diagnosis.is_known and diagnosis.can_wait and self.session.is_repairable():
                entry.ready = entry.ready or accelerator.mark()
                return Refused(error)
            self.session[Journal].drop(entry)
            raise

    def call(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation on the current connection, without the journal; returns the backend's work."""
        costs = self.session.costs
        since = costs.now() if costs.is_on else 0
        try:
            return fail_open.call_original(op, self.links.issue, op, args)
        finally:
            if since:
                costs.leave_out(COLLECTIVES, since)

    def is_receiver(self, args: tuple[Any, ...]) -> bool:
        """Whether this rank only receives: a broadcast reads the root's tensors alone."""
        return len(args) > 1 and args[1].rootRank != self._rank

    def bridge(self, entry: Entry, inner: Any) -> None:
        """Complete the entry's future when `inner` completes; not in the caller's thread, or DDP loses its overlap."""

        inner.get_future().add_done_callback(partial(self._end, entry, inner))

    def _end(self, entry: Entry, inner: Any, finished: torch.futures.Future[Any]) -> None:
        try:
            finished.value()
        except Exception as error:
            self.session[Journal].note_failure(entry, inner, error)
            return
        self.complete(entry, inner)

    def complete(self, entry: Entry, inner: Any) -> None:
        """The operation has completed; ignored if `inner` is not its newest work."""
        session = self.session
        journal = session.parts[Journal]
        with journal.lock:
            if entry.is_done or entry.inner is not inner:
                return
            if entry.given is not None:
                unpack_given(entry)
            entry.note_result()
            if entry.input.is_borrowed:
                output = entry.outputs[0]
                if session.observers.keep_result(session, entry.sequence, entry.number, output):
                    entry.kept_version = output._version
            if session.keeper is not None:
                session.keeper.complete(entry)
            entry.is_done = True
            if journal.may_settle:
                journal.settle_before(entry)
        try:
            if entry.place:
                session[Results].keep(entry)
        finally:  # a device may have failed meanwhile: whoever waits must not wait for ever
            if entry.promise is not None:
                entry.settle(entry.outputs)
            entry.release()


def groups_of(session: Rank) -> list[ManagedGroup]:
    """The groups that the script has made and not destroyed, in the order of their making."""
    return [group for group in list(session.made.living.values()) if isinstance(group, ManagedGroup)]


for _name in OPERATIONS:
    setattr(ManagedGroup, _name, torch_calls.operation(_name))
for _name in POINT_TO_POINT:
    setattr(ManagedGroup, _name, torch_calls.point_to_point(_name))
