"""Where the source of a state and those that it repairs meet: on one node, or over nodes. Read `MeetingPlace` first."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

_TOKEN_BYTES = 32


class MeetingPlace(Protocol):
    """Where a source and those that it repairs meet."""

    def listen(self, backlog: int) -> AbstractContextManager[socket.socket]:
        """The source's end. Raises OSError."""

    def admits(self, connection: socket.socket) -> bool:
        """Whether who has connected to the source is one of its receivers."""

    def connect(self, end_s: float, check: Callable[[], None]) -> socket.socket:
        """A receiver's end; waits until then. Raises TimeoutError, OSError.

        check   called while it waits; its exception ends the wait
        """


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
        """All who may open the directory are."""
        return True

    def connect(self, end_s: float, check: Callable[[], None]) -> socket.socket:
        """A receiver's end. Raises TimeoutError, OSError."""
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
        self._values = values
        self._generation = generation
        self._name = name
        self._limit_s = limit_s
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
