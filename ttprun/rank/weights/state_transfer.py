"""Send the optimizers' tensors from a survivor to a replacement, as raw bytes over a Unix socket.

The tensors are sent in the order of `replicated`, after a header in msgpack; nothing is pickled. Of a sharded tensor
the survivor's part is sent, which must be the replacement's part, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable

import msgpack
import torch

from ttprun.rank.weights import sharded
from ttprun.rank.weights.replicated import NotRepairableError, describe, digest, digest_of_shards, take_over
from ttprun.rank.weights.tensor_bytes import bytes_of

_LENGTH = struct.Struct("<q")
_LOOK_AGAIN_S = 0.05


def serve(directory: str, name: str, receivers: int, limit_s: float, check: Callable[[], None]) -> str:
    """Send this rank's state to `receivers` ranks, one after the other; returns its digest.

    check    called while it waits for a receiver; its exception ends the wait

    Blocks at most `limit_s` seconds per receiver. Raises NotRepairableError, TimeoutError, OSError.
    """
    header, parts = describe()
    packed = msgpack.packb([header, [part.place for part in parts], digest_of_shards()])
    at = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{at}/{name}"
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(receivers)
            listener.settimeout(_LOOK_AGAIN_S)
            for _ in range(receivers):
                with _accept(listener, time.monotonic() + limit_s, check) as connection:
                    connection.settimeout(limit_s)
                    connection.sendall(_LENGTH.pack(len(packed)) + packed)
                    for part in parts:
                        connection.sendall(bytes_of(part.tensor))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(at)
    return digest()


def _accept(listener: socket.socket, end: float, check: Callable[[], None]) -> socket.socket:
    while True:
        try:
            return listener.accept()[0]
        except TimeoutError:
            check()
            if time.monotonic() > end:
                raise


def fetch(directory: str, name: str, limit_s: float) -> str:
    """Load a survivor's state; returns the digest of this rank's state then.

    Raises NotRepairableError if this rank's parameters do not match the survivor's, TimeoutError, OSError.
    """
    end = time.monotonic() + limit_s
    at = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            _connect(connection, f"/proc/self/fd/{at}/{name}", end)
            connection.settimeout(limit_s)
            _receive(connection)
    finally:
        os.close(at)
    return digest()


def _connect(connection: socket.socket, path: str, end: float) -> None:
    while True:
        try:
            connection.connect(path)
            return
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise TimeoutError("the source of the state does not answer") from None
            time.sleep(0.005)


def _receive(connection: socket.socket) -> None:
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    header, places, sent = msgpack.unpackb(_exactly(connection, size))
    left = iter(places)

    def fill(key: str, tensor: torch.Tensor) -> None:
        if (place := sharded.place_of(tensor)) != (theirs := next(left)):
            raise NotRepairableError(f"{key}: this rank's part is {place}, and the source's {theirs}")
        _fill(connection, sharded.local_of(tensor))

    take_over(header, fill)
    if (loaded := digest_of_shards()) != sent:
        raise NotRepairableError(f"the source's parts of sharded tensors have digest {sent}, and {loaded} was loaded")
    sharded.forget_gathered()


def _fill(connection: socket.socket, tensor: torch.Tensor) -> None:
    is_direct = tensor.is_cpu and tensor.is_contiguous()
    target = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
    _receive_into(connection, bytes_of(target))
    if target is not tensor:
        tensor.copy_(target)


def _exactly(connection: socket.socket, size: int) -> bytes:
    raw = bytearray(size)
    _receive_into(connection, memoryview(raw))
    return bytes(raw)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        received = connection.recv_into(view[got:])
        if not received:
            raise ConnectionError("the source of the state has closed the connection")
        got += received
