"""The agents of a group meet before they start their ranks: followers connect to the leader, and all compare notes.

The leader is the agent whose group rank is 0. It listens on the address by which it reaches the rendezvous, and puts
that, with a token made for this group, into torch's rendezvous store: whoever does not know the token is hung up on.
Nothing is started before all are there and fit each other (`meet`).

When nodes have left or joined (`--elastic`) they meet again, and need no rendezvous: the agent that has led names the
next leader, the place where that listens, and everybody's number, in one order (`meeting.Regroup`). Who does not come
in time is left out, as long as there are enough (`meet_again`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ttprun.agent.base.peers import Peers, ready
from ttprun.agent.base.spare_pool import Listener, SparePool, keep_alive
from ttprun.errors import ConfigError
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.channel import Channel

LIMIT_S = 60.0  # the agents come out of the same rendezvous
_FOLLOWER_LIMIT_S = LIMIT_S + 15.0  # by then the leader has said why not
_LOOK_AGAIN_S = 0.5
logger = logging.getLogger("ttprun")
CLOCK_LIMIT_S = 60.0  # checkpoints and logs of several nodes are put in order by their times
_LEADER, _OFF = "ttprun/leader", "ttprun/off"
KNOWN = {kind.__name__: kind for kind in (*get_args(node_messages.OfFollower), *get_args(node_messages.OfLeader))}
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
    master   address and port for the script's environment
    save_dir where checkpoints are kept if its agent leads
    listener     where its agent would listen if it led the next group; None: nodes neither join nor leave
    page     as in `meeting.Where`
    """

    number: int
    size: int
    ranks: int
    address: str
    alike: Mapping[str, str]
    master: str = ""
    save_dir: str = ""
    listener: meeting.Where | None = None
    page: str = ""


def meet(store: Any, place: Place) -> Peers:
    """Connect to the agents of the other nodes.

    store   of the rendezvous, whose keys are this group's own

    Blocks _FOLLOWER_LIMIT_S at most. Raises ConfigError on all nodes if they do not fit each other, NotMetError if some
    agent did not come.
    """
    return _lead(store, place) if place.number == 0 else _follow(store, place)


def _lead(store: Any, place: Place) -> Peers:
    listener = Listener(place.address, KNOWN, place.page)
    with _seen_file(place) as seen, contextlib.ExitStack() as undone:
        undone.callback(listener.close)
        where = json.dumps(listener.where | {"seen": seen})
        arrivals = _gather(listener, place.size, LIMIT_S, lambda: store.set(_LEADER, where))
        links = [arrival.link for arrival in arrivals.values()]
        if len(links) < place.size - 1:
            why = f"{place.size - 1 - len(links)} of {place.size} agents did not connect within {LIMIT_S:.0f} s"
            store.set(_OFF, why)
            for link in links:
                link.close()
            raise NotMetError(why)
        reason, cure = _why_unfit(place, arrivals)
        for link in links:
            link.send(meeting.Rejected(reason, cure) if reason else meeting.Accepted())
        if reason:
            for link in links:
                link.close()
            raise ConfigError(reason, cure)
        undone.pop_all()
    peers = _led(place, listener, arrivals)
    peers.without_save_dir = sorted(number for number, arrival in arrivals.items() if not arrival.hello.shares)
    return peers


class _Arrival(NamedTuple):
    """An agent that has come to the one that leads; `ahead_s`: its clock, of ours."""

    link: Channel
    hello: meeting.Hello
    ahead_s: float


def _gather(
    listener: Listener, size: int, limit_s: float, announce: Callable[[], None] = lambda: None
) -> dict[int, _Arrival]:
    """Those of the other agents, by node, that come in time; whoever comes later is let in to wait for slots."""
    arrivals: dict[int, _Arrival] = {}
    ends_s = time.monotonic() + limit_s

    def came(link: Channel, hello: meeting.Hello) -> None:
        if 0 < hello.node < size:
            arrivals[hello.node] = _Arrival(link, hello, hello.at_s - time.time())

    with selectors.DefaultSelector() as selector:
        listener.open(selector, came)
        announce()
        while len(arrivals) < size - 1 and time.monotonic() < ends_s:
            for key, _ in selector.select(max(0.0, ends_s - time.monotonic())):
                key.data()
        listener.shut()
    return arrivals


def _led(place: Place, listener: Listener, arrivals: Mapping[int, _Arrival]) -> Peers:
    """The group that this agent leads."""
    hellos = {number: arrival.hello for number, arrival in arrivals.items()}
    names = {number: hello.address for number, hello in hellos.items()} | {0: place.address}
    links = {number: ready(arrival.link) for number, arrival in arrivals.items()}
    pool, own = SparePool(listener, place.alike, place.listener is not None), address_for_ranks(place.address)
    peers = Peers(place.number, own, place.ranks, links, names, place.size, pool, place.master)
    peers.pools = {0: meeting.Where(**listener.where)} | {number: hello.pool for number, hello in hellos.items()}
    # Where each node's agent listens if it leads the next group.
    peers.listeners = {0: place.listener or meeting.Where()}
    peers.listeners |= {number: hello.listener for number, hello in hellos.items()}
    return peers


@contextlib.contextmanager
def _seen_file(place: Place) -> Iterator[str]:
    """A file next to the checkpoints as long as this lasts: who sees it shares the directory; "" if there is none."""
    folder = Path(place.save_dir or "/nowhere")
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    path = folder / f".ttprun-{secrets.token_hex(8)}"
    try:
        path.touch()
    except OSError:
        path = Path()
    try:
        yield str(path) if path.name else ""
    finally:
        if path.name:
            path.unlink(missing_ok=True)


def _why_unfit(place: Place, arrivals: Mapping[int, _Arrival]) -> tuple[str, str]:
    """What differs between nodes, and what to do; ("", "") if they fit each other.

    ahead_s   by how much the clock of each node is ahead of ours
    """
    for _, (_, hello, ahead_s) in sorted(arrivals.items()):
        if abs(ahead_s) > CLOCK_LIMIT_S:
            off = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
            why = f"the clock of node {hello.node} ({hello.address}) is {off} that of node 0 ({place.address})"
            return why, "set the clocks of all nodes, by NTP for example"
        if place.listener is not None and not hello.shares:
            why = f"node {hello.node} ({hello.address}) does not see the save directory of node 0 ({place.address})"
            return why, "--elastic needs one that all nodes share (--save-dir)"
        for name, mine in place.alike.items():
            theirs = hello.alike.get(name, "")
            if theirs != mine:
                where = f"node 0 ({place.address}) and node {hello.node} ({hello.address})"
                return f"{where} differ in {name}: {mine} and {theirs}", "start the same on every node"
    return "", ""


def _follow(store: Any, place: Place) -> Peers:
    ends_s = time.monotonic() + _FOLLOWER_LIMIT_S
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
        listener = Listener(place.address, KNOWN, place.page)
        try:
            return _connect(place, where, max(_LOOK_AGAIN_S, ends_s - time.monotonic()), listener)
        except (OSError, EOFError) as error:  # of an earlier group, maybe: a new one comes in its place
            listener.close()
            why = f"{where['address']} port {where['port']}: {error}"
            time.sleep(_LOOK_AGAIN_S)
        except BaseException:
            listener.close()
            raise
    raise NotMetError(f"the agent that leads cannot be reached ({why})")


def _connect(place: Place, where: dict[str, Any], limit_s: float, listener: Listener) -> Peers:
    """`listener`: where this agent listens if it leads later."""
    sock = socket.create_connection((where["address"], where["port"]), timeout=limit_s)
    link = Channel(sock, KNOWN)
    try:
        shares = bool(where["seen"]) and os.path.exists(where["seen"])
        next_listener, alike, now_s = place.listener or meeting.Where(), dict(place.alike), time.time()
        own = meeting.Where(**listener.where)
        hello = meeting.Hello(where["token"], place.number, place.address, alike, shares, now_s, next_listener, own)
        link.send(hello)
        answer: Any = link.receive_with_fds()[0]
    except (OSError, EOFError):
        link.close()
        raise
    if isinstance(answer, meeting.Rejected):
        link.close()
        raise ConfigError(answer.reason, answer.cure)
    if not isinstance(answer, meeting.Accepted):
        link.close()
        raise OSError(f"an answer that is none: {answer}")
    names, links = {0: where["address"], place.number: place.address}, {0: ready(link)}
    pool, address = SparePool(listener, place.alike, place.listener is not None), address_for_ranks(place.address)
    return Peers(place.number, address, place.ranks, links, names, place.size, pool, place.master)


def own_address(named: str | None, endpoint: str, limit_s: float = 0.0) -> str:
    """The address by which the other nodes reach this one.

    named      --local-addr
    endpoint   of the rendezvous, host:port: what we reach it by is good for the others too
    limit_s    for the endpoint's name to become known: a pod has none before it is placed on a machine

    Blocks for `limit_s` at most. Raises OSError if the endpoint's name is not known.
    """
    if named:
        return socket.gethostbyname(named)
    host, _, port = endpoint.rpartition(":")
    ends_s, has_said_so = time.monotonic() + limit_s, False
    while True:
        try:
            addresses = socket.getaddrinfo(host or "localhost", int(port or 0), type=socket.SOCK_DGRAM)
            break
        except socket.gaierror:
            if time.monotonic() >= ends_s:
                raise
        if not has_said_so:
            has_said_so = True
            logger.warning("waiting for the name %s to become known (limit: %.0f s)", host, limit_s)
        time.sleep(_LOOK_AGAIN_S)
    family, kind, protocol, _, address = addresses[0]
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


AGAIN_LIMIT_S = 30.0  # all have got the order at once, and have to end their ranks
_FOLLOWER_AGAIN_LIMIT_S = AGAIN_LIMIT_S + 10.0
_TRY_AGAIN_S = 0.2


def meet_again(
    order: meeting.Regroup, place: Place, listener: Listener, make_store: Callable[[], str]
) -> tuple[Peers, str]:
    """Connect to the other agents.

    place        of this node: without its numbers, which are in the order
    listener         of this agent, at which the others come in if it leads
    make_store   called by the leader; makes a store for the ranks, and returns its address and port

    returns   the connections; address and port of the ranks' store

    Blocks _FOLLOWER_LIMIT_S at most. Raises NotMetError if too few came.
    """
    place = replace(place, number=order.node, size=order.size)
    return _lead_again(order, place, listener, make_store) if order.node == 0 else _follow_again(order, place)


def _lead_again(
    order: meeting.Regroup, place: Place, listener: Listener, make_store: Callable[[], str]
) -> tuple[Peers, str]:
    arrivals = [arrival for _, arrival in sorted(_gather(listener, order.size, AGAIN_LIMIT_S).items())]
    size = 1 + len(arrivals)
    if size < order.least:
        why = f"{size} of at least {order.least} nodes came within {LIMIT_S:.0f} s"
        for arrival in arrivals:
            arrival.link.send(meeting.Rejected(why, "start the launchers again: all resume from the checkpoint"))
            arrival.link.close()
        listener.close()
        raise NotMetError(why)
    master = make_store()
    for number, arrival in enumerate(arrivals, start=1):
        arrival.link.send(meeting.Accepted(number, size, master))
    return _led(replace(place, size=size, master=master), listener, dict(enumerate(arrivals, start=1))), master


def _follow_again(order: meeting.Regroup, place: Place) -> tuple[Peers, str]:
    ends_s, why = time.monotonic() + _FOLLOWER_AGAIN_LIMIT_S, "it does not listen"
    while time.monotonic() < ends_s:
        try:
            return _connect_again(order, place, max(_TRY_AGAIN_S, ends_s - time.monotonic()))
        except (OSError, EOFError) as error:
            why = str(error) or type(error).__name__
            time.sleep(_TRY_AGAIN_S)
    raise NotMetError(f"{order.where.address}, whose agent would lead, cannot be reached ({why})")


def _connect_again(order: meeting.Regroup, place: Place, limit_s: float) -> tuple[Peers, str]:
    where = order.where
    sock = socket.create_connection((where.address, where.port), timeout=limit_s)
    keep_alive(sock)
    link, own_listener = Channel(sock, KNOWN), Listener(place.address, KNOWN, place.page)
    pool = SparePool(own_listener, place.alike, sees_needed=True)
    try:
        alike, listener = dict(place.alike), place.listener or meeting.Where()
        own = meeting.Where(**pool.listener.where)
        link.send(meeting.Hello(where.token, order.node, place.address, alike, True, time.time(), listener, own))
        answer: Any = link.receive_with_fds()[0]
    except (OSError, EOFError):
        link.close()
        pool.listener.close()
        raise
    if not isinstance(answer, meeting.Accepted):
        link.close()
        pool.listener.close()
        is_refusal = isinstance(answer, meeting.Rejected)
        raise NotMetError(answer.reason if is_refusal else f"an answer that is none: {answer}")
    names, links = {0: where.address, answer.node: place.address}, {0: ready(link)}
    own_address = address_for_ranks(place.address)
    peers = Peers(answer.node, own_address, place.ranks, links, names, answer.size, pool, answer.master)
    return peers, answer.master
