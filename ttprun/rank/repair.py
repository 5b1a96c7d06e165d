"""State on its way from a survivor to a replacement: what the optimizers update, as raw bytes over a Unix socket.

The order is the same in every rank: optimizers as they were made, their groups, the groups' parameters, of each the
weights and then the optimizer's state by name. A header in msgpack says what comes; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import torch
import xxhash

from ttprun.rank import boundary
from ttprun.rank.tensor_bytes import bytes_of

_LENGTH = struct.Struct("<q")
_LOOK_AGAIN_S = 0.05
_PLAIN = (int, float, bool, str, type(None))


class NotRepairableError(RuntimeError):
    """An optimizer holds something that cannot be sent; the message names it."""


def _parameters() -> Iterator[tuple[str, torch.Tensor, dict[str, Any], torch.optim.Optimizer]]:
    for number, optimizer in enumerate(boundary.optimizers()):
        for group_number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = f"optimizer {number}, group {group_number}, parameter {index}"
                yield name, parameter, optimizer.state.get(parameter, {}), optimizer


def _describe() -> tuple[list[Any], list[torch.Tensor]]:
    """What this rank holds: a header that says it, and the tensors in its order."""
    header: list[Any] = []
    tensors: list[torch.Tensor] = []
    for name, parameter, state, _ in _parameters():
        entries = []
        tensors.append(parameter.detach())
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                entries.append([key, True, str(value.dtype)[6:], list(value.shape)])
                tensors.append(value.detach())
            elif isinstance(value, _PLAIN):
                entries.append([key, False, value, None])
            else:
                raise NotRepairableError(f"{name} has state '{key}' of type {type(value).__name__}")
        header.append([str(parameter.dtype)[6:], list(parameter.shape), entries])
    return header, tensors


def digest() -> str:
    """A hash of everything that optimizers update; equal in ranks that hold the same. Raises NotRepairableError."""
    header, tensors = _describe()
    state = xxhash.xxh3_64(msgpack.packb(header))
    for tensor in tensors:
        state.update(bytes_of(tensor))
    return state.hexdigest()


def serve(directory: str, name: str, receivers: int, limit_s: float, check: Callable[[], None]) -> str:
    """Send this rank's state to `receivers` ranks, one after the other; returns its digest.

    check    called while it waits for a receiver; raises if there is nothing to wait for any more

    Blocks at most `limit_s` seconds a receiver. Raises NotRepairableError, TimeoutError, OSError.
    """
    header, tensors = _describe()
    packed = msgpack.packb(header)
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
                    for tensor in tensors:
                        connection.sendall(bytes_of(tensor))
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
    """Take over a survivor's state; returns the digest of what this rank holds then.

    Raises NotRepairableError if this rank's parameters are not the survivor's, TimeoutError, OSError.
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
    header = msgpack.unpackb(_exactly(connection, size))
    held = list(_parameters())
    if len(held) != len(header):
        raise NotRepairableError(
            f"the replacement's optimizers hold {len(held)} parameters, the source's {len(header)}"
        )
    for (name, parameter, _, optimizer), (dtype, shape, entries) in zip(held, header, strict=True):
        if list(parameter.shape) != shape or str(parameter.dtype)[6:] != dtype:
            raise NotRepairableError(f"{name} has shape {list(parameter.shape)}, in the source {shape}")
        _fill(connection, parameter.detach())
        if not entries:
            optimizer.state.pop(parameter, None)
            continue
        old = optimizer.state[parameter]
        new: dict[str, Any] = {}
        for key, is_tensor, value, entry_shape in entries:
            if not is_tensor:
                new[key] = value
                continue
            tensor = old.get(key)
            kind = getattr(torch, value)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != kind or list(tensor.shape) != entry_shape:
                tensor = torch.empty(entry_shape, dtype=kind)
            _fill(connection, tensor)
            new[key] = tensor
        old.clear()
        old.update(new)


def _fill(connection: socket.socket, tensor: torch.Tensor) -> None:
    target = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
    view = bytes_of(target)
    got = 0
    while got < len(view):
        received = connection.recv_into(view[got:])
        if not received:
            raise ConnectionError("the source of the state has gone")
        got += received
    if target is not tensor:
        tensor.copy_(target)


def _exactly(connection: socket.socket, size: int) -> bytes:
    raw = bytearray(size)
    view = memoryview(raw)
    got = 0
    while got < size:
        received = connection.recv_into(view[got:])
        if not received:
            raise ConnectionError("the source of the state has gone")
        got += received
    return bytes(raw)
