"""A gloo backend of one group in one generation, whose connections can be cut at once.

gloo's own abort() does not wake a rank that waits for a living peer (torch 2.13), so the backend's TCP sockets are shut
down instead: every pending operation then fails within milliseconds. The listener is left alone: shutting it down
aborts the process. Each backend gets a gloo device of its own, hence its own listening port, which identifies its
sockets.

Addresses are exchanged through the agent (`Exchange`), so that needs no port, and a wait for a peer that will never
come ends with the generation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from ttprun.groups import p2p_channels, reduce_scatter
from ttprun.protocol import from_rank

if TYPE_CHECKING:
    from ttprun.protocol.channel import Channel

CONNECT_LIMIT = timedelta(seconds=120)
_MESSAGES_LIMIT_S = 0.5  # for the other end of a message, when a connection is closed


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


class Connection:
    """A connected gloo backend: the `Link` of gloo.

    native   torch's process group over it, which picks the operation by a tensor's device

    Constructing it blocks until every member has connected, at most CONNECT_LIMIT; raises GenerationOverError if the
    generation ends first.
    """

    is_late = False
    is_used = True
    why_not = ""
    is_aborted = needs_stop = False
    _making = threading.Lock()

    def __init__(
        self, exchange: Exchange, generation: int, name: str, rank: int, size: int, op_limit: timedelta
    ) -> None:
        prefix = f"group {name}/"
        opened_before = _native_fds()
        with Connection._making:
            before = _listening_ports()
            device = dist.ProcessGroupGloo.create_device(hostname=exchange.address)
            ports = _listening_ports() - before
        exchange.put(generation, f"{prefix}port {rank}", ",".join(map(str, ports)).encode())
        self._ports = set(ports)
        self._inodes: set[int] = set()
        self._listeners = dict.fromkeys(ports, rank)
        # Wait for all members here, before entering C++ code that cannot be interrupted.
        for peer in range(size):
            listed = exchange.get(generation, f"{prefix}port {peer}", CONNECT_LIMIT.total_seconds())
            theirs = {int(port) for port in listed.split(b",") if port}
            self._ports |= theirs
            self._listeners |= dict.fromkeys(theirs, peer)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=20)
        self.backend: Any = dist.ProcessGroupGloo(ExchangeStore(exchange, generation, prefix), rank, size, options)
        self.backend._set_default_timeout(op_limit)
        self.native: Any = ProcessGroup(rank, size)  # type: ignore[call-arg]
        self.native._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.native._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self.backend)
        self._spare_memory = reduce_scatter.SpareMemory()
        self._p2p_channels = p2p_channels.P2pChannels(op_limit)
        self._rank, self._size = rank, size
        self.generation = generation
        # A broken socket has lost its addresses, but must be found to be cut: gloo may wait on it for ever.
        self._inodes = {os.fstat(sock.fileno()).st_ino for sock in self.sockets()}
        for fd in _native_fds() - opened_before:  # the script's child processes must not hold them open
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)

    def serve(self, device_type: str) -> None:
        """Carry tensors on another device, too."""
        self.native._register_backend(torch.device(device_type), ProcessGroup.BackendType.GLOO, self.backend)

    def issue(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation; returns its work."""
        if reduce_scatter.is_for(op, args):
            return reduce_scatter.ReduceScatter(self.native, self._rank, self._size, args, self._spare_memory)
        if op in p2p_channels.OPERATIONS:
            return self._p2p_channels.issue(self.native, op, args)
        return getattr(self.native, op)(*args)

    issue_plainly = issue

    def abort(self) -> None:
        """Shut down every socket of this backend; pending and later operations fail at once."""
        for sock in self.sockets():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Destroy the backend with its threads; blocks until its operations have ended.

        Messages that are still under way after _MESSAGES_LIMIT_S are cut off.
        """
        self._p2p_channels.end()
        if not self._p2p_channels.join(_MESSAGES_LIMIT_S):
            self.abort()
            self._p2p_channels.join(_MESSAGES_LIMIT_S)
        self.backend = self.native = None

    def __del__(self) -> None:
        """If the last reference is dropped on one of gloo's threads, destroy the backend on a Python thread.

        gloo's callbacks hold a reference to the group, which the script may have destroyed meanwhile. The backend's
        destructor joins its threads: on one of them that aborts the process.
        """
        if (channels := self.__dict__.get("_p2p_channels")) is not None:
            channels.end()
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return
        references = [self.__dict__.pop(name, None) for name in ("backend", "native")]  # which the other thread drops
        try:
            threading.Thread(target=references.clear, name="ttprun-closing", daemon=True).start()
        except RuntimeError:  # Python 3.12 starts no thread at the interpreter's end
            _keep_for_ever(references)

    def is_busy(self) -> bool:
        """Not asked: its abort ends all operations."""
        return False

    def is_ready(self, args: tuple[Any, ...]) -> bool:
        """All members are connected from the start."""
        return True

    def make_ready(self, args: tuple[Any, ...]) -> None:
        """Nothing is left to do."""

    def drop(self) -> None:
        """Whoever holds the last reference destroys it."""

    def abandon(self) -> None:
        """Leak the backend: its destructor would wait for an operation that does not end.

        That happens now and then (gloo, torch 2.13) if the connection is cut while messages are in flight. As all
        sockets are closed, the operation touches no tensor any more; it ends with its time-out.
        """
        _keep_for_ever(self.backend)

    def sockets(self) -> Iterator[socket.socket]:
        """Duplicates of this backend's connected sockets; each is closed when the next one is yielded."""
        for fd in _socket_fds():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or _is_listening(sock):
                    continue
                is_known = os.fstat(sock.fileno()).st_ino in self._inodes
                if is_known or sock.getsockname()[1] in self._ports or sock.getpeername()[1] in self._ports:
                    yield sock

    def listener_of(self, port: int) -> int | None:
        """The rank in the group of the member that listens on a port; None if none does."""
        return self._listeners.get(port)


def listen(address: str) -> socket.socket:
    """A listener of our own, which is not taken for one of gloo's that is being made on another thread."""
    with Connection._making:
        return socket.create_server((address, 0), backlog=2)


def _keep_for_ever(value: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _socket_fds() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                fds.append(int(name))
    return fds


def _native_fds() -> set[int]:
    """Descriptors of the kinds that gloo opens (without close-on-exec, torch 2.13)."""
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "pipe:", "anon_inode:[eventpoll]")):
                fds.add(int(name))
    return fds


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening_ports() -> set[int]:
    ports = set()
    for fd in _socket_fds():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and _is_listening(sock):
                ports.add(sock.getsockname()[1])
    return ports
