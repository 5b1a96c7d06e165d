"""Copies of a rank's records and mirror on the next node, so that the ranks of a lost node can be replaced elsewhere.

The ranks with the same local rank form a ring over the nodes. Each sends what it has written to its recorder since the
boundary before to the one on the next node, and keeps what the one on the node before has sent in a recorder that its
own agent has made. With the first boundary of a generation all is sent. With `--buddy node` mirrors go the same way,
on connections of their own (`MirrorLink`). Begin with `Copies.keep_up`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

from ttprun.capture.records.recorder import Recorder
from ttprun.groups.connection import Exchange, GenerationOverError
from ttprun.groups.gloo import listen
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import channel, from_rank
from ttprun.protocol.board import EMPTY_SLOT, SLOTS, Field, SlotContent, slot_of, unpack_slot
from ttprun.state.files import opened
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.mirror_slots import Part

# Mirrors as they cross nodes (`--buddy node`): each rank sends its own to the next node, and keeps one for it.
#
# The state is sent while the script computes the next forward and backward pass, the gradients before the commit.
# That waits until what this rank's mirror gives has arrived: so at each moment after it the next node, too, gives the
# state of a boundary at which the survivors may be. Begin with `MirrorLink`; what a slot holds is in mirror.py.

_MIRROR_HEAD = struct.Struct("<4q")  # what the slot holds then, offset, bytes that follow, bytes of the whole slot
_CELLS = (Field.MIRROR_COPY_0, Field.MIRROR_COPY_1)


class _Sender:
    """Sends parts in the order in which they are added, on a thread of its own.

    In that order, and all of them: with two nodes this one may commit before the other one has got its part.
    """

    def __init__(self, session: Rank, sock: socket.socket, first: Iterable[Part]) -> None:
        self._board, self._rank = session.board, session.rank
        self._sock = sock
        self._is_over = False  # the connection is cut, or the other end refuses
        self._parts: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        for part in first:
            self._parts.put(part)
        threading.Thread(target=self._run, name="ttprun-next-node", daemon=True).start()

    def add(self, part: Part) -> None:
        """Send this, too; returns at once."""
        if not self._is_over:
            self._parts.put(part)

    def cut(self) -> None:
        self._parts.put(None)
        _shut(self._sock)

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._sock:
            while (part := self._parts.get()) is not None and not self._is_refused():
                self._send(part)
        self._is_over = True

    def _is_refused(self) -> bool:
        ready = select.poll()  # select() refuses descriptors from 1024 on
        ready.register(self._sock, select.POLLIN)
        return bool(ready.poll(0))

    def _send(self, part: Part) -> None:
        content, cell = part.held, (Field.MIRROR_0, Field.MIRROR_1)[slot_of(part.held.boundary)]
        with opened(part.path) as fd:
            self._sock.sendall(_MIRROR_HEAD.pack(content.pack(), part.at, part.size, part.whole))
            channel.send_part(
                *(self._sock, fd, part.at, part.size),
                lambda: not unpack_slot(self._board.get(self._rank, cell)).has_all_of(content),
            )


class MirrorLink:
    """The two connections of one generation. What comes is kept, on a thread of its own.

    to, from_before   to the next node, and from the node before
    boundary          the newest one whose state may be kept: what is kept of it is sent first

    A slot holds nothing while it is being written.
    """

    def __init__(self, session: Rank, to: socket.socket, from_before: socket.socket, boundary: int) -> None:
        mirror = session[Mirror]
        for sock in (to, from_before):
            sock.settimeout(None)
        self._sender = _Sender(session, to, mirror.parts(mirror.held(boundary)))
        mirror.on_kept = self._sender.add
        self._session = session
        self._of = (session.rank - len(session.rows_here)) % session.world_size
        self._sock = from_before
        self._paths, self._limit_bytes = session.options.mirror_copies, session.options.mirror_copies_bytes
        self._failure: OSError | None = None
        self._came = [
            EMPTY_SLOT
        ] * SLOTS  # what each slot has got on this connection; an older one may have filled it, too
        self._is_refused = self._has_reported = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="ttprun-node-before", daemon=True).start()

    def wait_for(self, cell: int, limit_s: float) -> bool:
        """Wait until as much is kept of the mirror of the node before; returns whether it is, or never will be.

        cell      `SlotContent`, packed
        limit_s   at most

        Raises OSError if the connection is broken.
        """
        wanted = unpack_slot(cell)
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(wanted) or self._failure is not None, limit_s)
        if self._is_settled(wanted):
            return True
        if self._failure is not None:
            raise ConnectionResetError(f"the connection for mirrors is broken: {self._failure}")
        return False

    def _is_settled(self, wanted: SlotContent) -> bool:
        return wanted == EMPTY_SLOT or self._is_refused or self._came[slot_of(wanted.boundary)].has_all_of(wanted)

    def _set(self, number: int, content: SlotContent) -> None:
        with self._changed:
            self._came[number] = content
            self._session.board.set(self._session.rank, _CELLS[number], content.pack())
            self._changed.notify_all()

    def cut(self) -> None:
        """Shut the connections down."""
        self._sender.cut()
        _shut(self._sock)

    def _run(self) -> None:
        try:
            with self._sock:
                while True:
                    self._take()
        except OSError as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self) -> None:
        cell, at, size, whole = _MIRROR_HEAD.unpack(channel.receive_exactly(self._sock, _MIRROR_HEAD.size))
        content = unpack_slot(cell)
        if content.boundary <= 0 or not 0 <= at <= at + size <= whole:
            raise channel.DamagedError("what has come is no part of a mirror")
        if self._is_awaited(content, whole):
            with opened(self._paths[slot_of(content.boundary)]) as fd:
                is_valid = channel.receive_part(self._sock, fd, at, size)
            if is_valid:
                self._set(slot_of(content.boundary), content)
                if not self._has_reported:
                    self._has_reported = True
                    self._report(content.boundary, whole)
        else:
            channel.receive_part(self._sock, -1, at, size)

    def _is_awaited(self, content: SlotContent, whole: int) -> bool:
        """Whether a part is to be kept; if so, its slot is ready for it."""
        number = slot_of(content.boundary)
        if self._is_refused:
            return False
        if content.has_step:
            return self._came[number] == content._replace(has_step=False)
        self._set(number, EMPTY_SLOT)
        try:
            self._make_room(number, whole)
        except OSError as error:
            self._refuse(content.boundary, whole, error.strerror or str(error))
        return not self._is_refused

    def _make_room(self, number: int, whole: int) -> None:
        """Raises OSError, also if the copy would take more memory than it may."""
        session, board = self._session, self._session.board
        board.set(session.rank, Field.MIRROR_COPY_BYTES, SLOTS * whole)
        if sum(board.get(row, Field.MIRROR_COPY_BYTES) for row in session.rows_here) > self._limit_bytes:
            raise OSError("too little memory")
        with opened(self._paths[number]) as fd:
            if os.fstat(fd).st_size != whole:
                os.ftruncate(fd, whole)
                os.posix_fallocate(fd, 0, whole)

    def _refuse(self, boundary: int, whole: int, why: str) -> None:
        """Keep nothing of what comes on this connection, and let the sender know."""
        self._is_refused = True
        for number, path in enumerate(self._paths):
            self._set(number, EMPTY_SLOT)
            os.truncate(path, 0)
        self._session.board.set(self._session.rank, Field.MIRROR_COPY_BYTES, 0)
        self._report(boundary, whole, why)
        self._sock.sendall(b"-")

    def _report(self, boundary: int, whole: int, why_not: str = "") -> None:
        report = from_rank.MirrorCopied(
            of=self._of, boundary=boundary, bytes=SLOTS * whole, limit_bytes=self._limit_bytes, why_not=why_not
        )
        self._session.channel.send(report)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


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

    def __init__(self, session: Rank, fd: int) -> None:
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
            _shut(sock)
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
