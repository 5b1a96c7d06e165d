"""Copies of the records on other nodes, so that the ranks of a lost node can be replayed elsewhere.

The ranks with the same local rank form a ring over the nodes. Each sends what it has written to its recorder since the
boundary before to the one on the next node, and keeps what the one on the node before has sent in a recorder that its
own agent has made. With the first boundary of a generation all is sent. With `--buddy node` mirrors go the same way,
on connections of their own (mirror_link.py). Begin with `Copies.keep_up`.
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

from ttprun.capture.records.recorder import Recorder
from ttprun.groups.connection import Exchange, GenerationOverError, listen
from ttprun.rank.session import Session
from ttprun.rank.step.mirror_link import MirrorLink
from ttprun.tensors.mirror import Mirror

_HEAD = struct.Struct("<qqq")  # boundary, what the mirror must hold then (packed; 0: nothing), bytes that follow
_PART = struct.Struct("<qq")  # offset in the recorder, bytes that follow
_READ_BYTES = 64 << 10
_TOKEN_BYTES = 32
_RECORDS, _MIRROR = b"r", b"m"  # what a connection is for
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
        self._kinds = (_RECORDS, _MIRROR) if session.options.mirror_copies else (_RECORDS,)

    def keep_up(self, generation: int, boundary: int, may_stop: MayStop, look_again_s: float) -> bool:
        """Send what is new up to this boundary, and keep what has come from the node before up to it.

        may_stop   called now and then; True, or an exception, ends the wait

        returns   False: the wait has ended before

        Raises OSError if a connection is broken, GenerationOverError.
        """
        link = self._connected_in(generation, boundary, may_stop, look_again_s)
        if link is None:
            return False
        if link.sent < boundary:
            mirrored = self._session[Mirror].held(boundary - 1).pack() if link.mirrors is not None else 0
            link.send(boundary, mirrored, self._session[Recorder].take_changes(all_of_it=link.sent < 0))
        while not link.pass_on(self._fd, boundary, look_again_s):
            if may_stop() or self._session.generation != generation:
                return False
        while link.mirrors is not None and not link.mirrors.wait_for(link.mirrored, look_again_s):
            if may_stop() or self._session.generation != generation:
                return False
        return True

    def _connected_in(self, generation: int, boundary: int, may_stop: MayStop, look_again_s: float) -> _Link | None:
        """The connections of this generation; None if the wait has ended before they were there."""
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
                    announced = exchange.get(generation, f"{_NAME}: {self._next}", look_again_s)
                    break
            address, port, theirs = announced.decode().split()
            to, from_before = dict[bytes, socket.socket](), dict[bytes, socket.socket]()
            for kind in self._kinds:
                to[kind] = opened.enter_context(socket.create_connection((address, int(port)), _CONNECT_LIMIT_S))
                to[kind].sendall(theirs.encode() + kind)
            listener.settimeout(look_again_s)
            while len(from_before) < len(self._kinds):
                if may_stop() or self._session.generation != generation:
                    return None
                with contextlib.suppress(TimeoutError):
                    came = opened.enter_context(listener.accept()[0])
                    if (kind := _kind_of(came, token.encode())) in self._kinds:
                        from_before[kind] = came
            opened.pop_all()
        mirrors = None
        if _MIRROR in to:
            mirrors = MirrorLink(self._session, to[_MIRROR], from_before[_MIRROR], boundary - 1)
        link = self._link = _Link(generation, to[_RECORDS], from_before[_RECORDS], mirrors)
        if self._session.generation != generation:  # a recovery has begun meanwhile, and cut what was there
            self.cut()
            raise GenerationOverError(f"generation {generation} is over")
        return link

    def cut(self) -> None:
        """A recovery begins, or this run of the script is over. The recovery thread calls this."""
        link, self._link = self._link, None
        if link is not None:
            link.cut()


def _kind_of(connection: socket.socket, token: bytes) -> bytes:
    """What a connection is for, by the one who has connected; b"" if it does not know the token."""
    connection.settimeout(_CONNECT_LIMIT_S)
    with contextlib.suppress(OSError):
        came = connection.recv(_TOKEN_BYTES + 1, socket.MSG_WAITALL)
        if hmac.compare_digest(came[:_TOKEN_BYTES], token):
            return came[_TOKEN_BYTES:]
    return b""


class _Link:
    """The connections to the next node and from the one before.

    sent, kept   the newest boundary of which all was handed to the kernel, or was kept; -1: none
    mirrors      the connections for mirrors; None: there are none
    mirrored     what the mirror of the node before must hold for the newest boundary that is kept, packed
    """

    def __init__(
        self, generation: int, to: socket.socket, from_before: socket.socket, mirrors: MirrorLink | None
    ) -> None:
        self.generation = generation
        self.mirrors = mirrors
        self.mirrored = 0
        self.sent = self._kept = -1
        self._to, self._from = to, from_before
        for sock in (to, from_before):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsent = memoryview(b"")
        self._came = bytearray()
        self._ready = select.poll()
        self._ready.register(from_before, select.POLLIN)

    def send(self, boundary: int, mirrored: int, parts: Iterable[tuple[int, bytes]]) -> None:
        """Send what was written of a boundary, and what the mirror must hold; what finds no room follows later."""
        body = b"".join(piece for offset, part in parts for piece in (_PART.pack(offset, len(part)), part))
        self._unsent = memoryview(b"".join((self._unsent, _HEAD.pack(boundary, mirrored, len(body)), body)))
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
            boundary, mirrored, size = _HEAD.unpack_from(self._came)
            if len(self._came) < _HEAD.size + size:
                return
            _write(fd, bytes(self._came[_HEAD.size : _HEAD.size + size]))
            del self._came[: _HEAD.size + size]
            self._kept, self.mirrored = boundary, mirrored

    def cut(self) -> None:
        """Shut the connections down; whoever waits for them gets an error."""
        for sock in (self._to, self._from):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self.mirrors is not None:
            self.mirrors.cut()

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
