"""The agents of a group meet before they start their ranks: each hand connects to the leader, and they compare notes.

The leader is the agent whose group rank is 0. It listens on the address by which it reaches the rendezvous, and puts
that, with a token made for this group, into torch's rendezvous store: whoever does not know the token is hung up on.
Nothing is started before all are there and fit each other. Begin with `meet`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args

from ttprun.agent.peers import Peers
from ttprun.errors import ConfigError
from ttprun.protocol import nodes
from ttprun.protocol.channel import Channel

LIMIT_S = 60.0  # the agents come out of the same rendezvous
_HAND_LIMIT_S = LIMIT_S + 15.0  # by then the leader has said why not
_LOOK_AGAIN_S = 0.5
_LEADER, _OFF = "ttprun/leader", "ttprun/off"
_KNOWN = {kind.__name__: kind for kind in (*get_args(nodes.OfHand), *get_args(nodes.OfLeader))}
_SIOCGIFADDR = 0x8915


class NotMetError(Exception):
    """The agents have not met; all know it, and the ranks run as under torchrun."""


@dataclass(frozen=True)
class Place:
    """This node among those of its group.

    number   of the node: its agent's group rank
    size     nodes
    ranks    local ranks
    address  by which the others reach it
    alike    what must be the same on all nodes, by its name for people
    """

    number: int
    size: int
    ranks: int
    address: str
    alike: Mapping[str, str]


def meet(store: Any, place: Place) -> Peers:
    """Connect to the agents of the other nodes.

    store   of the rendezvous, whose keys are this group's own

    Blocks _HAND_LIMIT_S at most. Raises ConfigError on all nodes if they do not fit each other, NotMetError if some
    agent did not come.
    """
    return _lead(store, place) if place.number == 0 else _follow(store, place)


def _lead(store: Any, place: Place) -> Peers:
    token = secrets.token_hex(16)
    found: dict[int, tuple[Channel, nodes.Hello]] = {}
    ends_s = time.monotonic() + LIMIT_S
    with socket.create_server((place.address, 0), backlog=place.size) as listener:
        where = {"address": place.address, "port": listener.getsockname()[1], "token": token}
        store.set(_LEADER, json.dumps(where))
        while len(found) < place.size - 1:
            listener.settimeout(max(0.01, ends_s - time.monotonic()))
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                why = f"{place.size - 1 - len(found)} of {place.size} agents did not connect within {LIMIT_S:.0f} s"
                store.set(_OFF, why)
                for link, _ in found.values():
                    link.close()
                raise NotMetError(why) from None
            hello = _hello_of(sock, token)
            if hello is not None:
                found[hello[1].node] = hello
    reason, cure = _why_unfit(place, [hello for _, hello in found.values()])
    for link, _ in found.values():
        link.send(nodes.Rejected(reason, cure) if reason else nodes.Accepted())
    if reason:
        for link, _ in found.values():
            link.close()
        raise ConfigError(reason, cure)
    names = {number: hello.address for number, (_, hello) in found.items()} | {0: place.address}
    links = {number: _ready(link) for number, (link, _) in found.items()}
    return Peers(place.number, address_for_ranks(place.address), place.ranks, links, names, place.size)


def _hello_of(sock: socket.socket, token: str) -> tuple[Channel, nodes.Hello] | None:
    """Who has connected; None, and hung up on, if it is no hand of this group."""
    link = Channel(sock, _KNOWN)
    sock.settimeout(_LOOK_AGAIN_S * 4)
    with contextlib.suppress(OSError, EOFError):
        hello: Any = link.receive_with_fds()[0]
        if isinstance(hello, nodes.Hello) and hmac.compare_digest(hello.token.encode(), token.encode()):
            return link, hello
    link.close()
    return None


def _why_unfit(place: Place, others: list[nodes.Hello]) -> tuple[str, str]:
    """What differs between nodes, and what to do; ("", "") if they fit each other."""
    for hello in sorted(others, key=lambda one: one.node):
        for name, mine in place.alike.items():
            theirs = hello.alike.get(name, "")
            if theirs != mine:
                where = f"node 0 ({place.address}) and node {hello.node} ({hello.address})"
                return f"{where} differ in {name}: {mine} and {theirs}", "start the same on every node"
    return "", ""


def _follow(store: Any, place: Place) -> Peers:
    ends_s = time.monotonic() + _HAND_LIMIT_S
    why = "the agent that leads is not known"
    while time.monotonic() < ends_s:
        why_not, where = "", None
        with contextlib.suppress(Exception):  # torch's stores raise errors of their own if a key is not there yet
            why_not = store.get(_OFF).decode() if store.check([_OFF]) else ""
            store.wait([_LEADER], timedelta(seconds=_LOOK_AGAIN_S))
            where = json.loads(store.get(_LEADER))
        if why_not:
            raise NotMetError(why_not)
        if where is None:
            continue
        try:
            return _connect(place, where, max(_LOOK_AGAIN_S, ends_s - time.monotonic()))
        except (OSError, EOFError) as error:  # of an earlier group, maybe: a new one comes in its place
            why = f"{where['address']} port {where['port']}: {error}"
            time.sleep(_LOOK_AGAIN_S)
    raise NotMetError(f"the agent that leads cannot be reached ({why})")


def _connect(place: Place, where: dict[str, Any], limit_s: float) -> Peers:
    sock = socket.create_connection((where["address"], where["port"]), timeout=limit_s)
    link = Channel(sock, _KNOWN)
    try:
        link.send(nodes.Hello(where["token"], place.number, place.address, dict(place.alike)))
        answer: Any = link.receive_with_fds()[0]
    except (OSError, EOFError):
        link.close()
        raise
    if isinstance(answer, nodes.Rejected):
        link.close()
        raise ConfigError(answer.reason, answer.cure)
    if not isinstance(answer, nodes.Accepted):
        link.close()
        raise OSError(f"an answer that is none: {answer}")
    names = {0: where["address"], place.number: place.address}
    return Peers(place.number, address_for_ranks(place.address), place.ranks, {0: _ready(link)}, names, place.size)


def _ready(link: Channel) -> Channel:
    """A connection as the supervisor's selector wants it: nobody waits for it."""
    link.sock.settimeout(None)
    link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.waits = False
    return link


def own_address(named: str | None, endpoint: str) -> str:
    """The address by which the other nodes reach this one.

    named      --local-addr
    endpoint   of the rendezvous, host:port: what we reach it by is good for the others too

    Raises OSError if the endpoint's name is not known.
    """
    if named:
        return socket.gethostbyname(named)
    host, _, port = endpoint.rpartition(":")
    found = socket.getaddrinfo(host or "localhost", int(port or 0), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(address)  # sends nothing
        own: str = sock.getsockname()[0]
    return own


def address_for_ranks(own: str) -> str:
    """Where this node's ranks listen for their groups: the interface that GLOO_SOCKET_IFNAME names, else `own`."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not interface:
        return own
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(packed[20:24])
