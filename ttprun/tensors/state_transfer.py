"""Send the optimizers' tensors, or gradients, from a survivor to a replacement, as raw bytes.

The tensors are sent in the order of `replicated`, after a header in msgpack; nothing is pickled. Of a sharded tensor
the survivor's part is sent, which must be the replacement's part, too. On one node the bytes go through shared memory
(`_Ring`), else over the socket.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgpack
import torch

from ttprun.device import accelerator
from ttprun.introspect import model_tensors, stages
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.model_tensors import shown_to
from ttprun.introspect.tensor_bytes import bytes_of, plain, unseen
from ttprun.protocol.channel import receive_exactly, receive_into
from ttprun.protocol.reason import Reason
from ttprun.tensors import sharded
from ttprun.tensors.memory import Memory, free_bytes
from ttprun.tensors.replicated import describe, digest, digest_of_shards, take_over_parts

# Where the source of a state and those that it repairs meet: on one node, or over nodes. Read `InDirectory` first.


_TOKEN_BYTES = 32


class InDirectory:
    """On one node: a Unix socket in the run's directory, which only its user may enter.

    note   called with what the operator should know
    """

    def __init__(self, directory: str, name: str, note: Callable[[str], None] = lambda _: None) -> None:
        self._directory = directory
        self._name = name
        self.note = note

    @contextlib.contextmanager
    def listen(self, backlog: int) -> Iterator[socket.socket]:
        """The source's end."""
        with self._address() as path:
            try:
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(path)
                    os.chmod(path, 0o600)
                    listener.listen(backlog)
                    yield listener
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def admits(self, connection: socket.socket) -> bool:
        """Whether who has connected to the source is one of its receivers: all who may open the directory are."""
        return True

    def connect(self, end_s: float, check: Callable[[], None]) -> socket.socket:
        """A receiver's end; waits until then. Raises TimeoutError, OSError.

        check   called while it waits; its exception ends the wait
        """
        with self._address() as path:
            while True:
                connection = socket.socket(socket.AF_UNIX)
                try:
                    connection.connect(path)
                    return connection
                except (FileNotFoundError, ConnectionRefusedError):
                    connection.close()
                    check()
                    if time.monotonic() > end_s:
                        raise TimeoutError("the source of the state does not answer") from None
                    time.sleep(0.005)

    @contextlib.contextmanager
    def _address(self) -> Iterator[str]:
        """A short name of the socket: addresses have 108 bytes at most."""
        at = os.open(self._directory, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{at}/{self._name}"
        finally:
            os.close(at)


class Values(Protocol):
    """What all ranks can put values into and get them from (`ttprun.groups.connection.Exchange`)."""

    address: str

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Send a value to all.

        The arguments are as of `ttprun.groups.connection.Exchange.put`.
        """

    def get(self, generation: int, key: str, limit_s: float) -> bytes:
        """Wait for a value.

        The arguments are as of `ttprun.groups.connection.Exchange.get`.
        """


class OverNodes:
    """On several nodes: a TCP port of the source, named to all ranks by way of the agents, with a token."""

    def __init__(self, values: Values, generation: int, name: str, limit_s: float) -> None:
        self._values, self._generation, self._name, self._limit_s = values, generation, name, limit_s
        self._token = b""

    @contextlib.contextmanager
    def listen(self, backlog: int) -> Iterator[socket.socket]:
        """The source's end."""
        with socket.create_server((self._values.address, 0), backlog=backlog) as listener:
            self._token = secrets.token_hex(_TOKEN_BYTES // 2).encode()
            where = f"{self._values.address} {listener.getsockname()[1]} ".encode() + self._token
            self._values.put(self._generation, self._name, where)
            yield listener

    def admits(self, connection: socket.socket) -> bool:
        """Who sends the token first."""
        try:
            return hmac.compare_digest(receive_exactly(connection, _TOKEN_BYTES), self._token)
        except OSError:
            return False

    def connect(self, end_s: float, check: Callable[[], None]) -> socket.socket:
        """A receiver's end. The wait for the address ends with the generation."""
        where = self._values.get(self._generation, self._name, self._limit_s)
        address, port, token = where.decode().split(" ")
        connection = socket.create_connection((address, int(port)), timeout=max(0.1, end_s - time.monotonic()))
        connection.sendall(token.encode())
        return connection


MeetingPlace = InDirectory | OverNodes


_LENGTH = struct.Struct("<q")
_LOOK_AGAIN_S = 0.05

# How the tensors go. One byte says which way it is; with the ring's comes the descriptor of its memory.


_RING, _SOCKET = b"r", b"s"
_RING_FROM_BYTES = 1 << 20  # less is in a socket at once
_NO_BYTES = torch.empty(0, dtype=torch.uint8)
_SLOTS = 2
_SLOT_BYTES = 8 << 20  # a device copies it in less than a millisecond, and CUDA registers two in a few


class _Ring:
    """Two slots of memory that both ends have: one is filled while the other is read.

    The socket says how many bytes are in the next slot, and that a slot was read. The memory has no name, so it goes
    with the last process that has it, however that ends.

    connection   between the ends, with a time-out
    fd           of the memory, which has its size
    limit_s      for each wait for the device
    """

    def __init__(self, connection: socket.socket, fd: int, limit_s: float) -> None:
        self._connection = connection
        self._limit_s = limit_s
        self._memory = Memory(f"/proc/self/fd/{fd}")
        self._memory.open()
        self._memory.pin_more()
        self._slot_bytes = self._memory.size // _SLOTS
        self._turn = 0
        self._at = 0  # in the slot
        self._in_slot = 0  # the receiver's: bytes that there are
        self._unread = 0  # the source's: slots that the receiver has not read yet

    @unseen
    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send all of them. Raises OSError, also if the receiver leaves before all is in the slots."""
        with torch.no_grad(), accelerator.beside(accelerator.mark()):
            for tensor in tensors:
                flat = _flat(tensor if _is_direct(tensor) else plain(tensor))
                at = 0
                while at < len(flat):
                    if self._at == 0 and self._unread == _SLOTS:
                        self._await_reader()
                    size = min(len(flat) - at, self._slot_bytes - self._at)
                    self._part(size).copy_(flat[at : at + size], non_blocking=True)
                    at += size
                    if self._at == self._slot_bytes:
                        self._pass_on()
            if self._at:
                self._pass_on()
        with contextlib.suppress(OSError):  # all was given: what becomes of it the receiver says by itself
            while self._unread:
                self._await_reader()

    def _pass_on(self) -> None:
        accelerator.finish_here(self._limit_s)
        self._connection.sendall(_LENGTH.pack(self._at))
        self._unread += 1
        self._turn, self._at = (self._turn + 1) % _SLOTS, 0

    def _await_reader(self) -> None:
        receive_exactly(self._connection, 1)
        self._unread -= 1

    @unseen
    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a tensor; what this thread gives its stream from now on finds it so. Raises OSError."""
        target = tensor.detach() if _is_direct(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = _flat(target)
        with torch.no_grad():
            with accelerator.beside(accelerator.mark()):
                at = 0
                while at < len(flat):
                    if self._at == self._in_slot:
                        self._next()
                    size = min(len(flat) - at, self._in_slot - self._at)
                    flat[at : at + size].copy_(self._part(size), non_blocking=True)
                    at += size
                written = accelerator.mark()
            if written is not None:
                accelerator.wait_on(written)
            if not _is_direct(tensor):
                tensor.copy_(target)

    def _next(self) -> None:
        """Wait for the next slot."""
        self.end_slot()
        (self._in_slot,) = _LENGTH.unpack(receive_exactly(self._connection, _LENGTH.size))
        if not 0 < self._in_slot <= self._slot_bytes:
            raise ConnectionError(f"the source of the state has put {self._in_slot} bytes into {self._slot_bytes}")

    def end_slot(self) -> None:
        """All that was received is where it belongs: let the source have the slot."""
        if not self._in_slot:
            return
        with accelerator.beside():
            accelerator.finish_here(self._limit_s)
        with contextlib.suppress(OSError):  # a source that is lost is noticed where more is expected of it
            self._connection.sendall(b"\0")
        self._turn, self._at, self._in_slot = (self._turn + 1) % _SLOTS, 0, 0

    def _part(self, size: int) -> torch.Tensor:
        """The next bytes of the slot."""
        begin, self._at = self._turn * self._slot_bytes + self._at, self._at + size
        return self._memory.tensor(begin, torch.empty(size, dtype=torch.uint8, device="meta"))

    def close(self) -> None:
        """Let go of the memory, once no copy uses it."""
        with contextlib.suppress(Exception):  # a device that has failed or hangs may still use it: it stays then
            with accelerator.beside():
                accelerator.finish_here(self._limit_s)
            self._memory.unmap()


def _is_direct(tensor: torch.Tensor) -> bool:
    """Whether its elements are copied as they lie in memory, by the device of this thread or on the CPU."""
    is_here = tensor.is_cpu or tensor.get_device() == accelerator.current_index()
    return is_here and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    if tensor.is_cpu:
        return torch.frombuffer(bytes_of(tensor), dtype=torch.uint8) if tensor.numel() else _NO_BYTES
    return tensor.detach().reshape(-1).view(torch.uint8)


def _ring_for(place: MeetingPlace, connection: socket.socket, size_bytes: int, limit_s: float) -> _Ring | None:
    """The source's end of a ring; None, once the receiver knows that it all comes over the socket.

    size_bytes   of all tensors

    Raises OSError.
    """
    if not isinstance(place, InDirectory) or size_bytes < _RING_FROM_BYTES:
        connection.sendall(_SOCKET)
        return None
    size = _SLOTS * min(_SLOT_BYTES, size_bytes // _SLOTS)
    with contextlib.ExitStack() as at_end:
        try:
            if (free := free_bytes()) is not None and free < 2 * size:
                raise OSError(f"{free >> 20} MiB are free")
            fd = os.memfd_create("ttprun-ring", os.MFD_CLOEXEC)
            at_end.callback(os.close, fd)
            os.posix_fallocate(fd, 0, size)
            ring = _Ring(connection, fd, limit_s)
        except OSError as error:
            place.note(
                f"no {size >> 20} MiB of shared memory for state on its way to another rank ({error}): "
                "it goes over a socket, which is slower"
            )
            connection.sendall(_SOCKET)
            return None
        socket.send_fds(connection, [_RING], [fd])
    return ring


@contextlib.contextmanager
def _way_of(connection: socket.socket, limit_s: float) -> Iterator[Callable[[torch.Tensor], None]]:
    """The receiver's end: what fills each tensor. Raises ConnectionError, OSError."""
    way, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if way == _SOCKET:
        yield functools.partial(_fill, connection)
        return
    if way != _RING or not fds:
        raise ConnectionError("the source of the state has closed the connection")
    try:
        ring = _Ring(connection, fds[0], limit_s)
    finally:
        os.close(fds[0])
    with contextlib.closing(ring):
        yield ring.receive
        ring.end_slot()


def serve(place: MeetingPlace, receivers: int, limit_s: float, check: Callable[[], None]) -> str:
    """Send this rank's state to `receivers` ranks, one after the other; returns its digest.

    check    called while it waits for a receiver; its exception ends the wait

    Blocks at most `limit_s` seconds per receiver. Raises NotRepairableError, TimeoutError, OSError.
    """
    header, parts = describe()
    packed = msgpack.packb([header, [part.place for part in parts], digest_of_shards()])
    _send_to_each(place, receivers, limit_s, check, packed, [part.tensor for part in parts])
    return digest()


def _send_to_each(
    place: MeetingPlace,
    receivers: int,
    limit_s: float,
    check: Callable[[], None],
    packed: bytes,
    tensors: Sequence[torch.Tensor],
) -> None:
    with place.listen(receivers) as listener:
        listener.settimeout(_LOOK_AGAIN_S)
        for _ in range(receivers):
            with _accept(place, listener, limit_s, check) as connection:
                connection.sendall(_LENGTH.pack(len(packed)) + packed)
                ring = _ring_for(place, connection, sum(tensor.nbytes for tensor in tensors), limit_s)
                stages.reached("transfer")
                if ring is None:
                    for tensor in tensors:
                        connection.sendall(bytes_of(tensor))
                else:
                    with contextlib.closing(ring):
                        ring.send(tensors)


def serve_gradients(
    place: MeetingPlace, optimizer: torch.optim.Optimizer, receivers: int, limit_s: float, check: Callable[[], None]
) -> None:
    """Send the gradients with which an optimizer is about to step; arguments and errors as those of `serve`."""
    gradients = _gradients_of(optimizer)
    packed = msgpack.packb([_form_of(gradient) for gradient in gradients])
    _send_to_each(
        place, receivers, limit_s, check, packed, [gradient for gradient in gradients if gradient is not None]
    )


def take_gradients(
    place: MeetingPlace, optimizer: torch.optim.Optimizer, limit_s: float, check: Callable[[], None]
) -> None:
    """Load the gradients with which a survivor is about to step; arguments and errors as those of `fetch`."""
    gradients = _gradients_of(optimizer)
    with place.connect(time.monotonic() + limit_s, check) as connection:
        connection.settimeout(limit_s)
        (size,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
        theirs = msgpack.unpackb(receive_exactly(connection, size))
        mine = [_form_of(gradient) for gradient in gradients]
        if mine != theirs:
            raise NotRepairableError(
                Reason(
                    "other-weights", "this rank has gradients of other parameters than the source, or of other shapes"
                )
            )
        with _way_of(connection, limit_s) as fill:
            for gradient in gradients:
                if gradient is not None:
                    fill(gradient)


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    """This rank's parts of them, by parameter. Raises NotRepairableError."""
    gradients = [parameter.grad for parameter in shown_to(optimizer)]
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
        raise NotRepairableError(Reason("other-weights", "a gradient is sparse, and cannot be taken from another rank"))
    return [None if gradient is None else model_tensors.local_of(gradient).detach() for gradient in gradients]


def _form_of(gradient: torch.Tensor | None) -> list[object] | None:
    return None if gradient is None else [str(gradient.dtype)[6:], list(gradient.shape)]


def _accept(place: MeetingPlace, listener: socket.socket, limit_s: float, check: Callable[[], None]) -> socket.socket:
    end_s = time.monotonic() + limit_s
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            check()
            if time.monotonic() > end_s:
                raise
            continue
        connection.settimeout(limit_s)
        if place.admits(connection):
            return connection
        connection.close()


def fetch(place: MeetingPlace, limit_s: float, check: Callable[[], None]) -> str:
    """Load a survivor's state; returns the digest of this rank's state then.

    Raises NotRepairableError if this rank's parameters do not match the survivor's, TimeoutError, OSError.

    limit_s   for the connection, and for each wait for data
    check     called while it waits for the connection; its exception ends the wait
    """
    with place.connect(time.monotonic() + limit_s, check) as connection:
        connection.settimeout(limit_s)
        _receive(connection, limit_s)
    return digest()


def _receive(connection: socket.socket, limit_s: float) -> None:
    (size,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    header, places, sent = msgpack.unpackb(receive_exactly(connection, size))
    with _way_of(connection, limit_s) as fill_part:
        stages.reached("transfer")
        take_over_parts(header, places, "the source's is", fill_part)
    if (loaded := digest_of_shards()) != sent:
        raise NotRepairableError(
            Reason(
                "other-weights", f"the source's parts of sharded tensors have digest {sent}, and {loaded} was loaded"
            )
        )
    sharded.forget_gathered()


def _fill(connection: socket.socket, tensor: torch.Tensor) -> None:
    is_direct = tensor.is_cpu and tensor.is_contiguous()
    target = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
    receive_into(connection, bytes_of(target))
    if target is not tensor:
        tensor.copy_(target)
