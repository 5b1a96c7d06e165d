"""Break this rank's connections to the others, on the real sockets: reset, silent, slow. Linux.

A link is all TCP connections to one peer, of all groups. On runs that allow faults each rank publishes which of its
ports leads to which rank (`publish`), since the accepting end of a connection cannot see that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import socket
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ttprun.chaos.injected_faults import Fault
from ttprun.groups.connection import Exchange
from ttprun.groups.gloo import Connection
from ttprun.groups.operations import tensors_in
from ttprun.groups.process_group import groups_of
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.tensor_bytes import bytes_of, plain
from ttprun.tensors import optimizer_registry

if TYPE_CHECKING:
    from ttprun.groups.inputs import Buckets

# Wrong numbers on purpose: a NaN in a gradient, a flipped bit in a parameter. As with defective memory, no version
# counter changes.


_REDUCING = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
)


def put_nan(op: str, inputs: Any, buckets: Iterable[Buckets] = ()) -> str:
    """Make the middle element of the first floating tensor NaN, if these are gradients; returns what was done, or "".

    inputs    the operation's argument: a tensor, or nested lists of tensors
    buckets   known buckets of DDP, whose gradient becomes NaN too, as after a real backward pass
    """
    for index, tensor in _floating(op, inputs):
        flat = tensor.detach().view(-1)
        at = flat.numel() // 2
        flat.numpy()[at] = float("nan")
        for gradient, place in [part for of_model in buckets for part in of_model.parts(flat)]:
            gradient.numpy()[place.isnan().numpy()] = float("nan")
        return f"element {at} of {flat.numel()} in tensor {index} of {op}"
    return ""


def flip_in(op: str, inputs: Any, seed: int) -> str:
    """As `put_nan`, but flip one bit: of a gradient, or if `op` is "" of what a module is called with."""
    for index, tensor in _floating(op, inputs):
        return f"{_flip(tensor, random.Random(seed))} in tensor {index} of {op or 'what a module is called with'}"
    return ""


def _floating(op: str, inputs: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The floating tensors of an operation that reduces gradients, or of a call."""
    for index, tensor in enumerate(tensors_in(inputs) if op in ("", *_REDUCING) else ()):
        if tensor.is_floating_point() and tensor.numel() and (not op or _is_gradient(tensor)):
            yield index, tensor


def _flip(tensor: torch.Tensor, drawn: random.Random) -> str:
    copy = plain(local_of(tensor).detach())
    raw = bytes_of(copy)
    at, bit = drawn.randrange(len(raw)), drawn.randrange(8)
    raw[at] ^= 1 << bit
    if not tensor.is_cpu:
        local_of(tensor).data.copy_(copy)
    return f"bit {bit} of byte {at}"


def _is_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor is reduced during backward (DDP's buckets), or is the gradient of an optimizer's parameter."""
    if torch._C._current_graph_task_id() != -1:
        return True
    gradients = (
        parameter.grad
        for optimizer in optimizer_registry.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return any(gradient is not None and gradient.data_ptr() == tensor.data_ptr() for gradient in gradients)


def flip_bit(seed: int, is_state: bool = False) -> str:
    """Flip one bit of one parameter that an optimizer holds; returns which. Raises ValueError if there is none.

    is_state   of what the optimizer keeps of a parameter instead
    """
    drawn = random.Random(seed)
    parameters = [
        (f"optimizer {number}, group {group_number}, parameter {index}", parameter)
        for number, optimizer in enumerate(optimizer_registry.optimizers())
        for group_number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter.numel() and parameter.is_contiguous()
    ]
    if is_state:
        states = {id(at): state for made in optimizer_registry.optimizers() for at, state in made.state.items()}
        parameters = [
            (f"{key} of {name}", value)
            for name, parameter in parameters
            for key, value in states.get(id(parameter), {}).items()
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.is_contiguous()
        ]
    if not parameters:
        raise ValueError(f"no optimizer holds a {'state' if is_state else 'parameter'} yet")
    name, tensor = drawn.choice(parameters)
    return f"{_flip(tensor, drawn)} in {name}"


# A simulated device that fails on purpose (`tests/simulated_npu`), in memory that holds the script's own tensors.
#
# The device raises its errors itself, when it meets what has failed.


def break_device(kind: str) -> str:
    """Break this process's device; returns what was done. Raises ValueError if that cannot be done."""
    breaking: Any = sys.modules.get("torch_npu.breaking")
    if breaking is None:
        raise ValueError(
            "only the simulated NPU can be broken on purpose: run with --device npu (ttprun guide devices)"
        )
    if kind == "link":
        breaking.fail_next_collective()
        return "simulated device; its next collective fails"
    if kind == "device-lost":
        breaking.lose_device()
        return "simulated device; it no longer answers"
    parts = (local_of(tensor) for tensor in optimizer_registry.stepped_tensors() if tensor.device.type == "npu")
    failed = [tensor for tensor in parts if tensor.untyped_storage().nbytes()]
    if not failed:
        raise ValueError("no optimizer holds a parameter on the device yet")
    if kind == "uce-fatal":
        breaking.fail_memory_of_library()
        return "simulated device; memory that belongs to no tensor fails in the next collective"
    if kind == "uce-low":
        activation = failed[0].detach().clone()
        breaking.fail_memory(activation)
        activation.add_(1)  # read, and then given back
        return f"simulated device; memory of an activation ({activation.nbytes} bytes) fails"
    for tensor in failed:
        breaking.fail_memory(tensor, breaking.State.UCE_EXIT if kind == "uce-high" else breaking.State.HBM_ECC_EXIT)
    size = sum(tensor.nbytes for tensor in failed)
    return f"simulated device; {len(failed)} tensors ({size} bytes) hold garbage, and fail when they are read"


SLOW_BYTES_PER_S = 256 << 10
_PEER_LIMIT_S = 5.0
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MAX_PACING_RATE = 26, 27, 47
_UNLIMITED = 0xFFFFFFFF


def publish(exchange: Exchange, connection: Connection, group_name: str, rank: int) -> None:
    """Publish to the other members of a group which of this rank's ports leads to which member.

    exchange     by which the others get it, in the connection's generation
    connection   that has just been made
    group_name   the same in all of them; the key is "group <name>/callers <rank>"
    rank         this rank's, in the group
    """
    called = {
        sock.getsockname()[1]: peer
        for sock in connection.sockets()
        if (peer := connection.listener_of(sock.getpeername()[1])) is not None
    }
    exchange.put(connection.generation, f"group {group_name}/callers {rank}", json.dumps(called).encode())


def links(session: Rank) -> dict[int, list[socket.socket]]:
    """Peer (global rank) -> duplicates of the sockets that lead to it, to be closed by the caller."""
    sockets: dict[int, list[socket.socket]] = defaultdict(list)
    for group in groups_of(session):
        connection = group.links.by_gloo
        if connection is None:
            continue
        callers = _callers(session[Exchange], connection, group.group_name, len(group.ranks), group.rank())
        for sock in connection.sockets():
            port = sock.getpeername()[1]
            peer = connection.listener_of(port)
            peer = callers.get(port) if peer is None else peer
            if peer is not None:
                sockets[group.ranks[peer]].append(_duplicate(sock))
    return dict(sockets)


def _duplicate(sock: socket.socket) -> socket.socket:
    """Another descriptor of the same socket. Not sock.dup(), which makes the socket blocking, for gloo too."""
    return socket.socket(fileno=os.dup(sock.fileno()))


def _callers(exchange: Exchange, connection: Connection, name: str, size: int, rank: int) -> dict[int, int]:
    """Port -> the member (its rank in the group) that has connected to this one from there."""
    ports: dict[int, int] = {}
    for peer in range(size):
        if peer != rank:
            callers = exchange.get(connection.generation, f"group {name}/callers {peer}", _PEER_LIMIT_S)
            ports |= {int(port): peer for port, called in json.loads(callers).items() if called == rank}
    return ports


def break_links(session: Rank, fault: Fault) -> str:
    """Break one link or all; returns what was done. Raises ValueError if there is no such link."""
    by_peer = links(session)
    try:
        peers = _chosen(session, fault, sorted(by_peer))
        sockets = [sock for peer in peers for sock in by_peer[peer]]
        for sock in sockets:
            _BREAK[fault.kind](sock, fault)
        if fault.seconds is not None and fault.kind in _RESTORE:
            _restore_later(fault, [_duplicate(sock) for sock in sockets])
    finally:
        for sock in (sock for of_peer in by_peer.values() for sock in of_peer):
            sock.close()
    return f"{len(sockets)} connections to rank {', '.join(map(str, peers))}"


def _chosen(session: Rank, fault: Fault, peers: list[int]) -> list[int]:
    if not peers:
        raise ValueError("this rank has no connection")
    if fault.peer is not None:
        if fault.peer not in peers:
            raise ValueError(f"this rank has no connection to rank {fault.peer}")
        return [fault.peer]
    following = next((peer for peer in peers if peer > session.rank), peers[0])
    return [following] if fault.kind == "silent" else peers


def _reset(sock: socket.socket, fault: Fault) -> None:
    """Both ends get a RST, as if a middlebox had dropped the connection.

    Connecting a socket to AF_UNSPEC resets its connection for the peer. This end gets no RST from that, so it is then
    connected to a port on which nothing listens: the RST in the answer wakes its waiters.
    """
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.connect(sock.fileno(), nowhere, len(nowhere)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(sock.family) as shut_listener:
        shut_listener.bind(("::1" if sock.family == socket.AF_INET6 else "127.0.0.1", 0))
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock.connect(shut_listener.getsockname())


def _silence(sock: socket.socket, fault: Fault) -> None:
    """Attach a packet filter that drops all input, acknowledgements too ("return 0 bytes")."""
    nothing = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(nothing)))


def _pace(sock: socket.socket, rate: int | bytes) -> None:
    """Have the kernel pace what this end sends."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


_BREAK: dict[str, Any] = {
    "reset": _reset,
    "silent": _silence,
    "cut-off": _silence,
    "slow": lambda sock, fault: _pace(sock, fault.rate or SLOW_BYTES_PER_S),
}
_RESTORE: dict[str, Any] = {
    **dict.fromkeys(("silent", "cut-off"), lambda sock: sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)),
    "slow": lambda sock: _pace(sock, struct.pack("=I", _UNLIMITED)),
}


def _restore_later(fault: Fault, sockets: list[socket.socket]) -> None:
    def restore() -> None:
        for sock in sockets:
            with contextlib.suppress(OSError), sock:
                _RESTORE[fault.kind](sock)

    timer = threading.Timer(fault.seconds or 0.0, restore)
    timer.daemon = True
    timer.start()
