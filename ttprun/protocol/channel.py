"""The channel between the agent and one rank: a socket pair, one message per line (`codec.py`).

A rank sends `from_rank.py` and `snapshot_messages.py`, and receives `to_rank.py`; `mindio.py` has both for a framework
with callbacks. An invalid line is read as `Refused`. The first message that a rank reads is its welcome, with the file
descriptors of the board and of its recorder.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import xxhash

from ttprun.protocol import from_rank, mindio, snapshot_messages, standby_messages, to_rank
from ttprun.protocol.codec import Refused, decode, encode

Report = from_rank.Report | standby_messages.Report | snapshot_messages.Report | mindio.Report
Order = to_rank.Order | mindio.Order
Sent = Report | Order
Message = Sent | Refused
MAX_FDS = 8
KNOWN = {kind.__name__: kind for kind in get_args(Sent)}


class Channel:
    """One end of the channel. `send` may be called from any thread; one thread reads.

    message_types   classes of the messages that may come, by name
    waits           `send` blocks until the message is sent; False: what cannot be sent at once is kept until `flush`
    """

    def __init__(self, sock: socket.socket, message_types: Mapping[str, type] = KNOWN) -> None:
        self.sock = sock
        self._known = message_types
        self.waits = True
        self._sending = threading.Lock()
        self._unread = b""
        self._put_back: list[Message] = []
        self._unsent = bytearray()
        self._out_of_reach: OSError | None = None

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self.sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send one message. A closed other end is not an error here: it is noticed elsewhere."""
        self.send_line(encode(message), fds)

    def send_line(self, line: bytes, fds: Sequence[int] = ()) -> None:
        """As `send`, for a message that was encoded once for many."""
        with self._sending, self._noted():
            if fds:
                rights = array.array("i", fds)
                sent = self.sock.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                line = line[sent:]
            if self.waits:
                self.sock.sendall(line)
            else:
                self._unsent += line
                self._send_kept()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """An error is none of the sender's. The kernel reports it once: afterwards the channel only reads as closed."""
        try:
            yield
        except ConnectionError:  # the other end has closed it
            pass
        except OSError as error:
            self._out_of_reach = self._out_of_reach or error

    def flush(self) -> None:
        """Send what was kept, without blocking."""
        if self._unsent:
            with self._sending, self._noted():
                self._send_kept()

    def finish(self) -> None:
        """Send what was kept; blocks as long as the socket's time-out says. Raises OSError."""
        self.sock.sendall(self._unsent)
        self._unsent.clear()

    def _send_kept(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the other end is closed
            raise

    def receive_with_fds(self) -> tuple[Message, list[int]]:
        """Read one message and the descriptors that came with it. Raises EOFError if the other end is closed."""
        fds: list[int] = []
        while b"\n" not in self._unread:
            data, received, _, _ = socket.recv_fds(self.sock, 1 << 16, MAX_FDS)
            for fd in received:
                os.set_inheritable(fd, False)  # Python 3.11's recv_fds ignores MSG_CMSG_CLOEXEC
            fds += received
            if not data:
                raise EOFError("the agent has closed the channel")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return self.read_line(line), fds

    def read_available(self) -> list[Message]:
        """The complete messages of one read. Raises EOFError if the other end is closed, OSError if it is lost."""
        data = self.sock.recv(1 << 16)
        if not data and self._out_of_reach is not None:
            raise self._out_of_reach
        if not data:
            raise EOFError("the other end has closed the channel")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self.read_line(line) for line in lines]

    def read_kept(self) -> list[Message]:
        """The complete messages that have come with one that was read before."""
        *lines, self._unread = self._unread.split(b"\n")
        kept, self._put_back = [*self._put_back, *(self.read_line(line) for line in lines)], []
        return kept

    def put_back(self, messages: Sequence[Message]) -> None:
        """Messages that were read too soon: `read_kept` gives them again."""
        self._put_back = [*messages, *self._put_back]

    def messages(self) -> Iterator[Message]:
        """All messages until the other end closes; blocks in between."""
        *lines, self._unread = self._unread.split(b"\n")
        yield from (self.read_line(line) for line in lines)
        while True:
            try:
                yield from self.read_available()
            except (EOFError, OSError):
                return

    def close(self) -> None:
        """Close this end."""
        self.sock.close()

    def read_line(self, line: bytes) -> Any:
        """The message of a line that has come by this channel."""
        return decode(line, self._known)


def pair() -> tuple[Channel, Channel]:
    """Two connected ends: the agent's and the rank's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), Channel(theirs)


# A part of a file in memory, sent over a connection with a digest after it. Begin with `send_part` and `receive_part`.
#
# Both read and write the file by its descriptor: a mapping of one that another thread makes shorter ends the process.

_CHUNK_BYTES = 1 << 20
_END = struct.Struct("<?Q")  # whether the content is valid, its digest


class DamagedError(OSError):
    """What has come is not what was sent."""


def send_part(sock: socket.socket, fd: int, at: int, size_bytes: int, has_changed: Callable[[], bool]) -> None:
    """Send so many bytes of a file, which may be overwritten or made shorter meanwhile.

    sock          blocking; its timeout, or its end, ends the call
    at            offset in the file
    has_changed   called after all was read: whether something of it has been overwritten

    Raises OSError.
    """
    digest = xxhash.xxh3_64()
    end, is_whole = at + size_bytes, True
    while at < end:
        part = os.pread(fd, min(_CHUNK_BYTES, end - at), at)
        is_whole = is_whole and bool(part)
        chunk = part or bytes(min(_CHUNK_BYTES, end - at))
        digest.update(chunk)
        sock.sendall(chunk)
        at += len(chunk)
    sock.sendall(_END.pack(is_whole and not has_changed(), digest.intdigest()))


def receive_part(sock: socket.socket, fd: int, at: int, size_bytes: int) -> bool:
    """Write so many bytes that come into a file; arguments as for `send_part`.

    fd        -1: nothing is written
    returns   whether it is valid: the sender has not overwritten it meanwhile

    Raises OSError, DamagedError if the digest does not fit.
    """
    digest = xxhash.xxh3_64()
    chunk = memoryview(bytearray(max(1, min(_CHUNK_BYTES, size_bytes))))
    end = at + size_bytes
    while at < end:
        came = sock.recv_into(chunk[: min(len(chunk), end - at)])
        if not came:
            raise ConnectionResetError("the connection has ended before all had come")
        digest.update(chunk[:came])
        if fd >= 0:
            os.pwrite(fd, chunk[:came], at)
        at += came
    is_valid, sent = _END.unpack(receive_exactly(sock, _END.size))
    if sent != digest.intdigest():
        raise DamagedError("what has come differs from what was sent")
    return bool(is_valid)


def receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """So few bytes that they fit into memory. Raises as `receive_into`."""
    received = bytearray(size_bytes)
    receive_into(sock, memoryview(received))
    return bytes(received)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill the memory with what comes. Raises ConnectionResetError if the connection ends before, OSError."""
    got = 0
    while got < len(view):
        came = sock.recv_into(view[got:])
        if not came:
            raise ConnectionResetError("the connection has ended before all had come")
        got += came
