"""Mirrors as they cross nodes (`--buddy node`): each rank sends its own to the next node, and keeps one for it.

The state is sent while the script computes the next forward and backward pass, the gradients before the commit. That
waits until what this rank's mirror gives has arrived: so at each moment after it the next node, too, gives the state of
a boundary at which the survivors may be. Begin with `MirrorLink`; what a slot holds is in mirror.py.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Iterable, Iterator

from ttprun.protocol import file_stream, from_rank
from ttprun.protocol.board import Field
from ttprun.protocol.mirror_messages import NOTHING, SLOTS, Held, slot_of, unpack
from ttprun.rank.session import Session
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.mirror_slots import Part

_HEAD = struct.Struct("<4q")  # what the slot holds then, offset, bytes that follow, bytes of the whole slot
_CELLS = (Field.MIRROR_COPY_0, Field.MIRROR_COPY_1)


class _NoRoomError(Exception):
    """The copy takes more memory than it may, or than there is."""


class MirrorLink:
    """The two connections of one generation.

    to, from_before   to the next node, and from the node before
    boundary          the newest one whose state may be kept: what is kept of it is sent first
    """

    def __init__(self, session: Session, to: socket.socket, from_before: socket.socket, boundary: int) -> None:
        mirror = session[Mirror]
        for sock in (to, from_before):
            sock.settimeout(None)
        self._sender = _Sender(session, to, mirror.parts(mirror.held(boundary)))
        self._receiver = _Receiver(session, from_before)
        mirror.on_kept = self._sender.add

    def wait_for(self, cell: int, limit_s: float) -> bool:
        """Wait until as much is kept of the mirror of the node before; returns whether it is, or never will be.

        cell      `Held`, packed
        limit_s   at most

        Raises OSError if the connection is broken.
        """
        return self._receiver.wait_for(unpack(cell), limit_s)

    def cut(self) -> None:
        """Shut the connections down."""
        self._sender.cut()
        self._receiver.cut()


class _Sender:
    """Sends parts in the order in which they are added, on a thread of its own.

    In that order, and all of them: with two nodes this one may commit before the other one has got its part.
    """

    def __init__(self, session: Session, sock: socket.socket, first: Iterable[Part]) -> None:
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
        fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._sock.sendall(_HEAD.pack(content.pack(), part.at, part.size, part.whole))
            file_stream.send(
                *(self._sock, fd, part.at, part.size),
                lambda: not unpack(self._board.get(self._rank, cell)).has_all_of(content),
            )
        finally:
            os.close(fd)


class _Receiver:
    """Keeps what comes, on a thread of its own; a slot holds nothing while it is being written."""

    def __init__(self, session: Session, sock: socket.socket) -> None:
        self._session = session
        self._of = (session.rank - len(session.rows_here)) % session.world_size
        self._sock = sock
        self._paths = session.options.mirror_copies
        self._failure: OSError | None = None
        self._came = [
            NOTHING
        ] * SLOTS  # what each slot has got on this connection; an older one may have filled it, too
        self._is_refused = self._has_reported = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="ttprun-node-before", daemon=True).start()

    def wait_for(self, wanted: Held, limit_s: float) -> bool:
        """As `MirrorLink.wait_for`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(wanted) or self._failure is not None, limit_s)
        if self._is_settled(wanted):
            return True
        if self._failure is not None:
            raise ConnectionResetError(f"the connection for mirrors is broken: {self._failure}")
        return False

    def _is_settled(self, wanted: Held) -> bool:
        return wanted == NOTHING or self._is_refused or self._came[slot_of(wanted.boundary)].has_all_of(wanted)

    def _set(self, number: int, content: Held) -> None:
        with self._changed:
            self._came[number] = content
            self._session.board.set(self._session.rank, _CELLS[number], content.pack())
            self._changed.notify_all()

    def cut(self) -> None:
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
        cell, at, size, whole = _HEAD.unpack(file_stream.receive_exactly(self._sock, _HEAD.size))
        content = unpack(cell)
        if content.boundary <= 0 or not 0 <= at <= at + size <= whole:
            raise file_stream.DamagedError("what has come is no part of a mirror")
        if self._is_awaited(content, whole):
            with _opened(self._paths[slot_of(content.boundary)]) as fd:
                is_valid = file_stream.receive(self._sock, fd, at, size)
            if is_valid:
                self._keep(content, whole)
        else:
            file_stream.receive(self._sock, -1, at, size)

    def _is_awaited(self, content: Held, whole: int) -> bool:
        """Whether a part is to be kept; if so, its slot is ready for it."""
        number = slot_of(content.boundary)
        if self._is_refused:
            return False
        if content.has_step:
            return self._came[number] == content._replace(has_step=False)
        self._set(number, NOTHING)
        try:
            self._make_room(number, whole)
        except OSError as error:
            self._refuse(content.boundary, whole, error.strerror or str(error))
        except _NoRoomError as error:
            self._refuse(content.boundary, whole, str(error))
        return not self._is_refused

    def _make_room(self, number: int, whole: int) -> None:
        """Raises OSError, _NoRoomError."""
        session, board = self._session, self._session.board
        board.set(session.rank, Field.MIRROR_COPY_BYTES, SLOTS * whole)
        if sum(board.get(row, Field.MIRROR_COPY_BYTES) for row in session.rows_here) > self._limit_bytes:
            raise _NoRoomError("too little memory")
        with _opened(self._paths[number]) as fd:
            if os.fstat(fd).st_size != whole:
                os.ftruncate(fd, whole)
                os.posix_fallocate(fd, 0, whole)

    @property
    def _limit_bytes(self) -> int:
        return self._session.options.mirror_copies_bytes

    def _keep(self, content: Held, whole: int) -> None:
        self._set(slot_of(content.boundary), content)
        if not self._has_reported:
            self._has_reported = True
            self._report(content.boundary, whole)

    def _refuse(self, boundary: int, whole: int, why: str) -> None:
        """Keep nothing of what comes on this connection, and let the sender know."""
        self._is_refused = True
        for number, path in enumerate(self._paths):
            self._set(number, NOTHING)
            os.truncate(path, 0)
        self._session.board.set(self._session.rank, Field.MIRROR_COPY_BYTES, 0)
        self._report(boundary, whole, why)
        self._sock.sendall(b"-")

    def _report(self, boundary: int, whole: int, why_not: str = "") -> None:
        report = from_rank.MirrorCopied(self._of, boundary, SLOTS * whole, self._limit_bytes, why_not)
        self._session.channel.send(report)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
