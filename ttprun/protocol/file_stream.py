"""A part of a file in memory, sent over a connection with a digest after it. Begin with `send` and `receive`.

Both read and write the file by its descriptor: a mapping of a file that another thread makes shorter ends the process.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

import xxhash

_CHUNK_BYTES = 1 << 20
_END = struct.Struct("<?Q")  # whether the content is valid, its digest


class DamagedError(OSError):
    """What has come is not what was sent."""


def send(sock: socket.socket, fd: int, at: int, size_bytes: int, has_changed: Callable[[], bool]) -> None:
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


def receive(sock: socket.socket, fd: int, at: int, size_bytes: int) -> bool:
    """Write so many bytes that come into a file; arguments as for `send`.

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
    """So few bytes that they fit into memory. Raises ConnectionResetError if the connection ends before, OSError."""
    received = bytearray()
    while len(received) < size_bytes:
        came = sock.recv(size_bytes - len(received))
        if not came:
            raise ConnectionResetError("the connection has ended before all had come")
        received += came
    return bytes(received)
