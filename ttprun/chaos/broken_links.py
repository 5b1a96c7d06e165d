"""Break this rank's connections to the others, on the real sockets: reset, silent, slow. Linux.

A link is all TCP connections to one peer, of all groups. On runs that allow faults each rank publishes which of its
ports leads to which rank (`publish`), since the accepting end of a connection cannot see that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import threading
from collections import defaultdict
from typing import Any

from ttprun.chaos.faults import Fault
from ttprun.groups.connection import Connection, Exchange
from ttprun.groups.process_group import groups_of
from ttprun.rank.session import Session

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


def links(session: Session) -> dict[int, list[socket.socket]]:
    """Peer (global rank) -> duplicates of the sockets that lead to it, to be closed by the caller."""
    found: dict[int, list[socket.socket]] = defaultdict(list)
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
                found[group.ranks[peer]].append(_duplicate(sock))
    return dict(found)


def _duplicate(sock: socket.socket) -> socket.socket:
    """Another descriptor of the same socket. Not sock.dup(), which makes the socket blocking, for gloo too."""
    return socket.socket(fileno=os.dup(sock.fileno()))


def _callers(exchange: Exchange, connection: Connection, name: str, size: int, rank: int) -> dict[int, int]:
    """Port -> the member (its rank in the group) that has connected to this one from there."""
    found: dict[int, int] = {}
    for peer in range(size):
        if peer != rank:
            callers = exchange.get(connection.generation, f"group {name}/callers {peer}", _PEER_LIMIT_S)
            found |= {int(port): peer for port, called in json.loads(callers).items() if called == rank}
    return found


def break_links(session: Session, fault: Fault) -> str:
    """Break one link or all; returns what was done. Raises ValueError if there is no such link."""
    known = links(session)
    try:
        peers = _chosen(session, fault, sorted(known))
        sockets = [sock for peer in peers for sock in known[peer]]
        for sock in sockets:
            _BREAK[fault.kind](sock, fault)
        if fault.seconds is not None and fault.kind in _RESTORE:
            _restore_later(fault, [_duplicate(sock) for sock in sockets])
    finally:
        for sock in (sock for found in known.values() for sock in found):
            sock.close()
    return f"{len(sockets)} connections to rank {', '.join(map(str, peers))}"


def _chosen(session: Session, fault: Fault, peers: list[int]) -> list[int]:
    if not peers:
        raise ValueError("this rank has no connection")
    if fault.peer is not None:
        if fault.peer not in peers:
            raise ValueError(f"this rank has no connection to rank {fault.peer}")
        return [fault.peer]
    if fault.kind != "silent":
        return peers
    return [next((peer for peer in peers if peer > session.rank), peers[0])]


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


def _hear_again(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _slow_down(sock: socket.socket, fault: Fault) -> None:
    """Have the kernel pace what this end sends."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, fault.rate or SLOW_BYTES_PER_S)


def _speed_up(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", _UNLIMITED))


_BREAK: dict[str, Any] = {"reset": _reset, "silent": _silence, "cut-off": _silence, "slow": _slow_down}
_RESTORE: dict[str, Any] = {"silent": _hear_again, "cut-off": _hear_again, "slow": _speed_up}


def _restore_later(fault: Fault, sockets: list[socket.socket]) -> None:
    def restore() -> None:
        for sock in sockets:
            with contextlib.suppress(OSError), sock:
                _RESTORE[fault.kind](sock)

    timer = threading.Timer(fault.seconds or 0.0, restore)
    timer.daemon = True
    timer.start()
