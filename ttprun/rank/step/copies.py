"""Copies of the records on other nodes, so that the ranks of a lost node can be replayed elsewhere.

The ranks with the same local rank form a ring over the nodes. Each sends what it has written to its recorder since the
boundary before to the one on the next node, and keeps what the one on the node before has sent in a recorder that its
own agent has made. With the first boundary of a generation all is sent. Begin with `Copies.keep_up`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable

from ttprun.rank.comm.connection import Exchange, GenerationOverError, listen
from ttprun.rank.records.recorder import Recorder
from ttprun.rank.session import Session

_HEAD = struct.Struct("<qq")  # boundary, bytes that follow
_PART = struct.Struct("<qq")  # offset in the recorder, bytes that follow
_READ_BYTES = 64 << 10
_TOKEN_BYTES = 32
_CONNECT_LIMIT_S = 10.0
_NAME = "ttprun's copies of records"

MayStop = Callable[[], bool]


class Copies:
    """This rank's part in it.

    fd   memfd for the records of the rank on the node before
    """

    def __init__(self, session: Session, fd: int) -> None:
        self._session = session
        self._fd = fd
        here, size = len(session.rows_here), session.world_size
        self._next, self._before = (session.rank + here) % size, (session.rank - here) % size
        self._link: _Link | None = None

    def keep_up(self, generation: int, boundary: int, may_stop: MayStop, look_again_s: float) -> bool:
        """Send what is new up to this boundary, and keep what has come from the node before up to it.

        may_stop   called now and then; True, or an exception, ends the wait

        returns   False: the wait has ended before

        Raises OSError if a connection is broken, GenerationOverError.
        """
        link = self._connected_in(generation, may_stop, look_again_s)
        if link is None:
            return False
        if link.sent < boundary:
            link.send(boundary, self._session[Recorder].take_changes(all_of_it=link.sent < 0))
        while not link.pass_on(self._fd, boundary, look_again_s):
            if may_stop() or self._session.generation != generation:
                return False
        return True

    def _connected_in(self, generation: int, may_stop: MayStop, look_again_s: float) -> _Link | None:
        if self._link is not None and self._link.generation == generation:
            return self._link
        exchange = self._session[Exchange]
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        with listen(exchange.address) as listener, contextlib.ExitStack() as opened:
            where = f"{exchange.address} {listener.getsockname()[1]} {token}"
            exchange.put(generation, f"{_NAME}: {self._session.rank}", where.encode())
            while True:
                if may_stop():
                    return None
                with contextlib.suppress(TimeoutError):
                    found = exchange.get(generation, f"{_NAME}: {self._next}", look_again_s)
                    break
            address, port, theirs = found.decode().split()
            to = opened.enter_context(socket.create_connection((address, int(port)), _CONNECT_LIMIT_S))
            to.sendall(theirs.encode())
            listener.settimeout(look_again_s)
            while True:
                if may_stop() or self._session.generation != generation:
                    return None
                with contextlib.suppress(TimeoutError):
                    from_before = opened.enter_context(listener.accept()[0])
                    if _is_token(from_before, token.encode()):
                        break
            opened.pop_all()
        link = self._link = _Link(generation, to, from_before)
        if self._session.generation != generation:  # a recovery has begun meanwhile, and cut what was there
            self.cut()
            raise GenerationOverError(f"generation {generation} is over")
        return link

    def cut(self) -> None:
        """A recovery begins, or this run of the script is over. The recovery thread calls this."""
        link, self._link = self._link, None
        if link is not None:
            link.cut()


def _is_token(connection: socket.socket, token: bytes) -> bool:
    """Whether the one who has connected knows it."""
    connection.settimeout(_CONNECT_LIMIT_S)
    with contextlib.suppress(OSError):
        return hmac.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token)
    return False


class _Link:
    """The connections to the next node and from the one before.

    sent, kept   the newest boundary of which all was handed to the kernel, or was kept; -1: none
    """

    def __init__(self, generation: int, to: socket.socket, from_before: socket.socket) -> None:
        self.generation = generation
        self.sent = self._kept = -1
        self._to, self._from = to, from_before
        for sock in (to, from_before):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsent = memoryview(b"")
        self._came = bytearray()
        self._ready = select.poll()
        self._ready.register(from_before, select.POLLIN)

    def send(self, boundary: int, parts: Iterable[tuple[int, bytes]]) -> None:
        """Send what was written of a boundary; what finds no room follows later."""
        body = b"".join(piece for offset, part in parts for piece in (_PART.pack(offset, len(part)), part))
        self._unsent = memoryview(b"".join((self._unsent, _HEAD.pack(boundary, len(body)), body)))
        self.sent = boundary
        self._send_rest()

    def _send_rest(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._to.send(self._unsent) :]
        if self._unsent:
            self._ready.register(self._to, select.POLLOUT)
        else:
            with contextlib.suppress(KeyError):
                self._ready.unregister(self._to)

    def pass_on(self, fd: int, boundary: int, limit_s: float) -> bool:
        """Whether all is sent, and all of this boundary is kept; waits so long for it. Raises OSError."""
        end_s = time.monotonic() + limit_s
        self._keep(fd)
        while self._unsent or self._kept < boundary:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._ready.poll(max(1, left_s * 1000)):
                return False
            if self._unsent:
                self._send_rest()
            self._keep(fd)
        return True

    def _keep(self, fd: int) -> None:
        """Keep what has come; half of a boundary is not."""
        with contextlib.suppress(BlockingIOError):
            while data := self._from.recv(_READ_BYTES):
                self._came += data
                if len(data) < _READ_BYTES:
                    break
            else:
                raise ConnectionResetError("the node before has closed the connection for its records")
        while len(self._came) >= _HEAD.size:
            boundary, size = _HEAD.unpack_from(self._came)
            if len(self._came) < _HEAD.size + size:
                return
            _write(fd, bytes(self._came[_HEAD.size : _HEAD.size + size]))
            del self._came[: _HEAD.size + size]
            self._kept = boundary

    def cut(self) -> None:
        """Shut the connections down; whoever waits for them gets an error."""
        for sock in (self._to, self._from):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        """Close them once nobody waits for them any more: their numbers may be given away then."""
        self._to.close()
        self._from.close()


def _write(fd: int, body: bytes) -> None:
    at, view = 0, memoryview(body)
    while at < len(body):
        offset, size = _PART.unpack_from(body, at)
        at += _PART.size
        os.pwrite(fd, view[at : at + size], offset)
        at += size
