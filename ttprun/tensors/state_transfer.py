"""Send the optimizers' tensors, or gradients, from a survivor to a replacement, as raw bytes over a socket.

The tensors are sent in the order of `replicated`, after a header in msgpack; nothing is pickled. Of a sharded tensor
the survivor's part is sent, which must be the replacement's part, too.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence

import msgpack
import torch

from ttprun.introspect import distributed_tensors
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.parameter_groups import shown_to
from ttprun.introspect.tensor_bytes import bytes_of
from ttprun.tensors import sharded
from ttprun.tensors.replicated import describe, digest, digest_of_shards, take_over
from ttprun.tensors.state_places import MeetingPlace, exactly, receive_into

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
    _send_to_each(place, receivers, limit_s, check, packed, [one for one in gradients if one is not None])


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
            raise NotRepairableError("this rank has gradients of other parameters than the source, or of other shapes")
        for gradient in gradients:
            if gradient is not None:
                _fill(connection, gradient)


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    """This rank's parts of them, by parameter. Raises NotRepairableError."""
    held = [parameter.grad for parameter in shown_to(optimizer)]
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in held):
        raise NotRepairableError("a gradient is sparse, and cannot be taken from another rank")
    return [None if gradient is None else distributed_tensors.local_of(gradient).detach() for gradient in held]


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
    left = iter(places)

    def fill(key: str, tensor: torch.Tensor) -> None:
        if (place := sharded.place_of(tensor)) != (theirs := next(left)):
            raise NotRepairableError(f"{key}: this rank's part is {place}, and the source's {theirs}")
        _fill(connection, distributed_tensors.local_of(tensor))

    take_over(header, fill)
    if (loaded := digest_of_shards()) != sent:
        raise NotRepairableError(f"the source's parts of sharded tensors have digest {sent}, and {loaded} was loaded")
    sharded.forget_gathered()


def _fill(connection: socket.socket, tensor: torch.Tensor) -> None:
    is_direct = tensor.is_cpu and tensor.is_contiguous()
    target = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
    receive_into(connection, bytes_of(target))
    if target is not tensor:
        tensor.copy_(target)
