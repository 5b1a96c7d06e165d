"""How the members of a group find each other (`Exchange`), and what a connection between them is (`Link`).

Addresses are exchanged through the agent, so that needs no port, and a wait for a peer that will never come ends with
the generation.

A backend for devices has one communicator for each device of this process (`Communicators.make`), and one for each pair
of ranks with messages, unless the script has given its device. NCCL and HCCL make one within the first collective on a
device, or a pair's first message: they block in C++, without a limit and deaf to an abort, until all members have come.
If a member is lost meanwhile, that thread is lost, too. So they are made here, on a thread that may be left behind,
once all members have said that they are about to. Whoever waits for it waits in Python, and no longer than the
generation lasts.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ttprun.introspect import stages
from ttprun.protocol import from_rank

if TYPE_CHECKING:
    from ttprun.protocol.channel import Channel


CONNECT_LIMIT = timedelta(seconds=120)


class GenerationOverError(RuntimeError):
    """The generation ended during a wait in it; the recovery tries again in the next."""


class GivenUpError(Exception):
    """Some rank makes torch's own groups, so all must."""


GIVEN_UP = "groups are torch's own"


class Exchange:
    """A key-value store of all ranks through the agent, separated by generation.

    address       where connections of this rank listen
    is_given_up   some rank could not make a managed group: from now on all make torch's own
    """

    def __init__(self, channel: Channel, address: str = "") -> None:
        self._channel = channel
        self.address = address or "127.0.0.1"
        self._values: dict[tuple[int, str], bytes] = {}
        self._over_before = 0
        self.is_given_up = False
        self._changed = threading.Condition()

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Send a value to all ranks, including this one.

        key   under which the others wait for it; a later value replaces the first
        """
        self.deliver(generation, key, value)
        self._channel.send(from_rank.Put(generation, key, value))

    def deliver(self, generation: int, key: str, value: bytes) -> None:
        """Store a value of this rank, or one that the agent has passed on, and wake those that wait for it.

        generation, key, value   as some rank has given them to `put`
        """
        with self._changed:
            self.is_given_up = self.is_given_up or key == GIVEN_UP
            self._values[generation, key] = value
            self._changed.notify_all()

    def give_up(self, generation: int) -> None:
        """Have all ranks make torch's own groups; those that wait for a member of a managed one get GivenUpError."""
        self.put(generation, GIVEN_UP, b"")

    def end_before(self, generation: int) -> None:
        """Generations before this one are over: waits in them raise GenerationOverError."""
        with self._changed:
            self._over_before = max(self._over_before, generation)
            self._values = {key: value for key, value in self._values.items() if key[0] >= generation}
            self._changed.notify_all()

    def has(self, generation: int, key: str) -> bool:
        """Whether a key has come."""
        with self._changed:
            return (generation, key) in self._values

    def get(self, generation: int, key: str, limit_s: float) -> bytes:
        """Wait until some rank has put a value under this key, at most `limit_s` seconds.

        generation   in which it is put

        Raises TimeoutError after that; GenerationOverError if the generation ends, GivenUpError if some rank makes
        torch's own groups, before it is there.
        """
        end = time.monotonic() + limit_s
        with self._changed:
            while (generation, key) not in self._values:
                if generation < self._over_before:
                    raise GenerationOverError(f"generation {generation} is over")
                if self.is_given_up:
                    raise GivenUpError
                remaining_s = end - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError(f"no rank has sent {key!r} within {limit_s:.0f} s")
                self._changed.wait(remaining_s)
            return self._values[generation, key]


class ExchangeStore(torch._C._distributed_c10d.Store):
    """The part of a Store that backends use to connect."""

    def __init__(self, exchange: Exchange, generation: int, prefix: str) -> None:
        super().__init__()
        self._exchange = exchange
        self._generation = generation
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._exchange.put(self._generation, self._prefix + key, raw)

    def get(self, key: str) -> bytes:
        return self._exchange.get(self._generation, self._prefix + key, CONNECT_LIMIT.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta = CONNECT_LIMIT) -> None:
        for key in keys:
            self._exchange.get(self._generation, self._prefix + key, timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._exchange.has(self._generation, self._prefix + key) for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def clone(self) -> ExchangeStore:
        """NCCL and HCCL ask for one for their other threads."""
        return self

    def deleteKey(self, key: str) -> bool:
        """The generation's end deletes all."""
        return False


@dataclass(frozen=True)
class GroupMember:
    """A member's place in a group, in one generation.

    exchange   by which the members find each other
    key        of the group, the same in all members
    name       of the group, as torch knows it
    rank       of this process in the group, which has `size` members
    ranks      global ranks of the members
    op_limit   the time limit that the script has asked for
    options    of the backend, as the script has given them (`pg_options`); None: torch's own
    device     that a barrier uses, of the script's `device_id` or its parameters; None: unknown
    is_given   it is the script's `device_id`
    connects_now   make a communicator on this device at once, if all members do: otherwise within the first collective
    """

    exchange: Exchange
    generation: int
    key: str
    name: str
    rank: int
    size: int
    ranks: Sequence[int]
    op_limit: timedelta
    options: Any = None
    device: Any = None
    is_given: bool = False
    connects_now: bool = False


class Link(Protocol):
    """A group's connection in one generation.

    backend   torch's backend, or a process group in Python
    is_late   see `Transport`
    why_not   why its operations cannot be repaired; "" if they can
    is_aborted    its operations have failed, whatever the backend says
    needs_stop    the backend's abort ends no running operation: only a stop of the device does
    is_used   an operation was issued that made the members connect, or they connect from the start
    """

    generation: int
    backend: Any
    is_late: bool
    why_not: str
    is_aborted: bool
    needs_stop: bool

    def is_busy(self) -> bool:
        """Whether an operation is still running."""

    @property
    def is_used(self) -> bool: ...

    def issue(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation; returns its work. Raises the backend's error.

        The work is completed when its outputs are there or it has failed, never before. `wait(limit)` blocks until
        then, and raises the operation's error, or RuntimeError after `limit`; `is_completed` and `is_success` do not
        block. `get_future` completes when the work does.
        """

    def issue_plainly(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation as torch does; returns what the backend returns."""

    def abort(self) -> None:
        """Pending and later operations fail at once."""

    def close(self) -> None:
        """Drop the backend; may block until its operations have ended."""

    def abandon(self) -> None:
        """Leak the backend, as an operation on it does not end."""

    def drop(self) -> None:
        """Forget the backend, whose operations have all ended; does not block."""

    def is_ready(self, args: tuple[Any, ...]) -> bool:
        """Whether a collective with these arguments can be issued without waiting for the other members."""

    def make_ready(self, args: tuple[Any, ...]) -> None:
        """Wait until it can. Raises GenerationOverError or TimeoutError."""


@dataclass(frozen=True)
class Transport:
    """One backend.

    device_types  of the tensors whose operations are repaired
    make          connect in a generation, first or again: blocks until all members have, at most CONNECT_LIMIT; raises
                  GenerationOverError if the generation ends first, TimeoutError, RuntimeError
    is_late       the backend's own `wait` returns before an operation has completed on its device
    gives_works   whether the backend returns a work for a synchronous operation; else None
    """

    name: str
    device_types: frozenset[str]
    make: Callable[[GroupMember], Link]
    is_late: bool = False
    gives_works: Callable[[], bool] = lambda: True


_LATER = b"-"  # what a member says that makes its communicator within its first collective


class Connecting(Protocol):
    """The link whose communicators are made: `LateLink`.

    is_aborted   its generation is over
    """

    backend: Any
    is_aborted: bool

    def abort(self) -> None: ...
    def wait_for(self, work: Any) -> None: ...


class Communicators:
    """Those of one group in one generation.

    is_left   a thread is in C++ to make one, maybe for ever: nobody else may call the backend, or destroy it
    """

    def __init__(self, member: GroupMember, device_type: str, prefix: str) -> None:
        self._member = member
        self._prefix = prefix
        # (index of a device, other rank of a pair) -> why there is no communicator, None: there is
        self._made: dict[tuple[int, int | None], Exception | None] = {}
        self._making = threading.Lock()
        self.is_left = False
        device = member.device
        knows = device is not None and device.type == device_type and device.index is not None
        self._said = str(device).encode() if knows and member.connects_now else _LATER

    def meet(self) -> bool:
        """Wait until all members are here; returns whether all are about to make a communicator, on `member.device`.

        Blocks for CONNECT_LIMIT at most. Raises GenerationOverError or TimeoutError.
        """
        return _LATER not in self._tell("here", self._said)

    @property
    def is_used(self) -> bool:
        """Whether there is one."""
        return bool(self._made)

    def has(self, device: torch.device, peer: int | None = None) -> bool:
        """Whether an operation on this device does not block: its communicator is there, or could not be made.

        peer   the other rank of a pair that has one of its own; None: that of the whole group
        """
        return device.type == "cpu" or (device.index, peer) in self._made

    def check(self, device: torch.device, peer: int | None = None) -> None:
        """Raise the error with which a communicator could not be made; arguments as for `has`."""
        error = self._made.get((device.index, peer))
        if error is not None:
            raise error.with_traceback(None)

    def make(self, device: torch.device, link: Connecting, have_met: bool = False, peer: int | None = None) -> None:
        """Make the communicator on a device, if there is none; an error is kept for `check`.

        have_met   all members are known to be about to make it
        peer       as for `has`

        Blocks until all members have made it, and no longer than a collective may last. Raises GenerationOverError if
        the generation ends first.
        """
        with self._making:
            if self.has(device, peer):
                return
            members = range(self._member.size) if peer is None else sorted({self._member.rank, peer})
            number = sum(other == peer for _, other in self._made)
            name = str(number) if peer is None else f"{number} of {members}"
            try:
                if have_met and not self._member.is_given:
                    stages.reached("connect")
                elif not have_met:  # a member may come late to its first collective
                    self._tell(f"connects {name}", b"1", max(CONNECT_LIMIT, self._member.op_limit), members)
                self._make_on_thread(name, device, link, peer)
            except TimeoutError as error:
                self._made[device.index, peer] = RuntimeError(f"a communicator could not be made: {error}")

    def _tell(
        self, what: str, value: bytes, limit: timedelta = CONNECT_LIMIT, members: Sequence[int] = ()
    ) -> list[bytes]:
        """Say something to these members, or all, and wait until each has said its own."""
        member = self._member
        member.exchange.put(member.generation, f"{self._prefix}{what} {member.rank}", value)
        limit_s = limit.total_seconds()
        keys = [f"{self._prefix}{what} {peer}" for peer in members or range(member.size)]
        return [member.exchange.get(member.generation, key, limit_s) for key in keys]

    def _make_on_thread(self, name: str, device: torch.device, link: Connecting, peer: int | None) -> None:
        exchange, generation = self._member.exchange, self._member.generation
        ended = f"{self._prefix}has connected {name}"
        failed: list[Exception] = []

        def connect() -> None:
            try:
                self._connect(device, link, peer)
            except Exception as error:
                failed.append(error.with_traceback(None))
            self.is_left = False
            exchange.deliver(generation, ended, b"1")  # for this process alone

        self.is_left = True
        threading.Thread(target=connect, name="ttprun-connecting", daemon=True).start()
        exchange.get(generation, ended, max(CONNECT_LIMIT, self._member.op_limit).total_seconds())
        self._made[device.index, peer] = failed[0] if failed else None

    def _connect(self, device: torch.device, link: Connecting, peer: int | None) -> None:
        """Have the backend make its communicator, as torch does: at once, if the script has given the device, and else
        within the first collective, or the first message of a pair."""
        backend, module = link.backend, getattr(torch, device.type)
        module.set_device(device.index)
        connect = getattr(backend, "eager_connect_single_device", None) if self._member.is_given else None
        if connect is not None:
            connect(device)
            work = None
        else:
            options: Any = dist.AllreduceOptions()
            options.asyncOp = True
            with module.stream(module.Stream(device)):  # not behind what the script has still running
                tensors = [torch.zeros(1, device=device)]
                if peer is None:
                    work = backend.allreduce(tensors, options)
                else:
                    work = (backend.send if self._member.rank < peer else backend.recv)(tensors, peer, 0)
        self.is_left = False
        if link.is_aborted:  # which this thread has missed, as it could not be reached
            link.abort()
        elif work is not None:
            link.wait_for(work)


def leak(value: Any) -> None:
    """Never destroy it: its destructor would wait for a thread that does not end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
