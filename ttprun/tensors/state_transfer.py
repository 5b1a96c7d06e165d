"""Send the optimizers' tensors, or gradients, from a survivor to a replacement, as raw bytes over a socket.

The tensors are sent in the order of `replicated`, after a header in msgpack; nothing is pickled. Of a sharded tensor
the survivor's part is sent, which must be the replacement's part, too.
"""

from __future__ import annotations

import contextlib
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

from ttprun.introspect import model_tensors
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.model_tensors import shown_to
from ttprun.introspect.tensor_bytes import bytes_of
from ttprun.protocol.reason import Reason
from ttprun.tensors import sharded
from ttprun.tensors.replicated import describe, digest, digest_of_shards, take_over

# Where the source of a state and those that it repairs meet: on one node, or over nodes. Read `InDirectory` first.


_TOKEN_BYTES = 32


class InDirectory:
    """On one node: a Unix socket in the run's directory, which only its user may enter."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._name = name

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
            return hmac.compare_digest(exactly(connection, _TOKEN_BYTES), self._token)
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


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises ConnectionError if there are no more, OSError."""
    raw = bytearray(size)
    receive_into(connection, memoryview(raw))
    return bytes(raw)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill the memory with what comes. Raises ConnectionError if there is too little, OSError."""
    got = 0
    while got < len(view):
        received = connection.recv_into(view[got:])
        if not received:
            raise ConnectionError("the source of the state has closed the connection")
        got += received


_LENGTH = struct.Struct("<q")
_LOOK_AGAIN_S = 0.05


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
                for tensor in tensors:
                    connection.sendall(bytes_of(tensor))


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
        (size,) = _LENGTH.unpack(exactly(connection, _LENGTH.size))
        theirs = msgpack.unpackb(exactly(connection, size))
        mine = [_form_of(gradient) for gradient in gradients]
        if mine != theirs:
            raise NotRepairableError(
                Reason(
                    "other-weights", "this rank has gradients of other parameters than the source, or of other shapes"
                )
            )
        for gradient in gradients:
            if gradient is not None:
                _fill(connection, gradient)


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
        _receive(connection)
    return digest()


def _receive(connection: socket.socket) -> None:
    (size,) = _LENGTH.unpack(exactly(connection, _LENGTH.size))
    header, places, sent = msgpack.unpackb(exactly(connection, size))
    remaining = iter(places)

    def fill(key: str, tensor: torch.Tensor) -> None:
        if (place := sharded.place_of(tensor)) != (theirs := next(remaining)):
            raise NotRepairableError(
                Reason("sharding-unknown", f"{key}: this rank's part is {place}, and the source's {theirs}")
            )
        _fill(connection, model_tensors.local_of(tensor))

    take_over(header, fill)
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
