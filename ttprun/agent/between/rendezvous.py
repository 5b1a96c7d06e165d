"""The agents of a group meet before they start their ranks: followers connect to the leader, and all compare notes.

The leader is the agent whose number is 0. Whoever does not know the token of its listener is hung up on. Nothing is
started before enough are there, and the leader has said to each what its number is. Begin with `meet`.

What differs between one meeting and another is its `Occasion`. At a first start, and at a restart, the leader puts the
place where it listens into torch's rendezvous store (`first_start`). When nodes have left or joined (`--elastic`), the
agent that has led names the next leader, the place where that listens, and everybody's number, in one order
(`regrouping`); nodes that do not come in time are left out, as long as there are enough. A launcher that waits for
slots comes by the same `connect` (`latecomers.py`).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from msgspec import structs

from ttprun.agent.base.peers import Peers, ready
from ttprun.agent.base.spare_pool import Listener, SparePool, keep_alive, why_unfit
from ttprun.errors import ConfigError
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.channel import Channel
from ttprun.protocol.codec import decode_fields, encode

LIMIT_S = 60.0  # the agents come out of the same rendezvous
AGAIN_LIMIT_S = 30.0  # all have got the order at once, and have to end their ranks
_FOLLOWERS_MORE_S = 15.0  # by then the leader has said why not
_LOOK_AGAIN_S = 0.5
_TRY_AGAIN_S = 0.2
logger = logging.getLogger("ttprun")
CLOCK_LIMIT_S = 60.0  # checkpoints and logs of several nodes are put in order by their times
_LEADER = "ttprun/leader"
_ANSWERS = {"Where": meeting.Where, "Rejected": meeting.Rejected}
KNOWN = {kind.__name__: kind for kind in (*get_args(node_messages.OfFollower), *get_args(node_messages.OfLeader))}
_SIOCGIFADDR = 0x8915


class NotMetError(Exception):
    """The agents have not met; all know it, and the ranks run as under torchrun."""


@dataclass(frozen=True)
class Place:
    """This node among those of its group.

    address  by which the others reach it
    alike    what must be the same on all nodes, by its name for people
    save_dir where checkpoints are kept if its agent leads
    seen     as in `meeting.Where`
    page     as in `meeting.Where`
    number   of the node: its agent's group rank; -1: it has none yet
    size     nodes
    ranks    local ranks
    master   address and port for the script's environment
    listener     where its agent would listen if it led the next group; None: nodes neither join nor leave
    """

    address: str = ""
    alike: Mapping[str, str] = field(default_factory=dict)
    save_dir: str = ""
    seen: str = ""
    page: str = ""
    number: int = -1
    size: int = 0
    ranks: int = 0
    master: str = ""
    listener: meeting.Where | None = None

    def open_listener(self) -> Listener:
        """Where this agent listens from now on, as soon as it leads."""
        return Listener(self.address, KNOWN, self.page, self.seen)

    def hello(self, listener: Listener) -> meeting.Hello:
        """Who comes; `listener`: of this agent, if the one that leads is lost."""
        return meeting.Hello(
            "",
            self.number,
            self.address,
            dict(self.alike),
            listener=self.listener or meeting.Where(),
            pool=listener.where,
        )

    def group(
        self, links: Mapping[int, Channel], names: Mapping[int, str], listener: Listener, leader: int = 0
    ) -> Peers:
        """The group in which this node has its numbers; the first three arguments are as in `Peers`."""
        own, pool = address_for_ranks(self.address), SparePool(listener, self.alike, self.listener is not None)
        links = {number: ready(link) for number, link in links.items()}
        return Peers(self.number, own, self.ranks, links, names, self.size, pool, self.master, leader)


class Occasion(NamedTuple):
    """Why agents meet, and what is different then.

    limit_s     for the others to come to the one that leads
    where       returns where that one listens, `Rejected` if it has given up, or None if neither is known yet
    announce    called by the one that leads with what `where` is to return
    least       so many must come; 0: all must, and must fit each other
    listener    of the agent that leads; None: it opens one
    make_store  called by the agent that leads: makes a store for the ranks, and returns its address and port; None: the
                ranks have one
    """

    limit_s: float
    where: Callable[[], Any]
    announce: Callable[[meeting.Where | meeting.Rejected], None] = lambda word: None
    least: int = 0
    listener: Listener | None = None
    make_store: Callable[[], str] | None = None


def first_start(store: Any) -> Occasion:
    """`store`: of the rendezvous that they come from, whose keys are this group's own."""

    def where() -> Any:
        with contextlib.suppress(Exception):  # torch's stores raise errors of their own if a key is not there yet
            store.wait([_LEADER], timedelta(seconds=_LOOK_AGAIN_S))
            return decode_fields(json.loads(store.get(_LEADER)), _ANSWERS)
        return None

    return Occasion(LIMIT_S, where, lambda word: store.set(_LEADER, encode(word).decode()))


def regrouping(order: meeting.Regroup, listener: Listener, make_store: Callable[[], str]) -> Occasion:
    """All have got the same order, but for their numbers; the other arguments are as in `Occasion`."""
    return Occasion(AGAIN_LIMIT_S, lambda: order.where, least=order.least, listener=listener, make_store=make_store)


def meet(occasion: Occasion, place: Place) -> Peers:
    """Connect to the agents of the other nodes.

    place   of this node, as far as it is known before

    Blocks for the limit of the occasion and _FOLLOWERS_MORE_S at most. Raises ConfigError on all nodes if they do not
    fit each other, NotMetError if too few come.
    """
    return _lead(occasion, place) if place.number == 0 else _follow(occasion, place)


class _Arrival(NamedTuple):
    """An agent that has come to the one that leads; `ahead_s`: its clock, of ours."""

    link: Channel
    hello: meeting.Hello
    ahead_s: float


def _lead(occasion: Occasion, place: Place) -> Peers:
    listener = occasion.listener or place.open_listener()
    with contextlib.ExitStack() as undone:
        undone.callback(listener.close)
        with _seen_file(place) as seen:
            where = structs.replace(listener.where, seen=seen)
            arrivals = _gather(listener, place.size, occasion.limit_s, lambda: occasion.announce(where))
        refusal = _why_not(occasion, place, arrivals)
        if refusal is not None:
            occasion.announce(refusal)
            for arrival in arrivals:
                arrival.link.send(refusal)
                arrival.link.close()
            refuse(refusal)
        undone.pop_all()
    master = place.master if occasion.make_store is None else occasion.make_store()
    place = replace(place, size=1 + len(arrivals), master=master)
    come = dict(enumerate(arrivals, start=1))
    for number, arrival in come.items():
        arrival.link.send(meeting.Accepted(number, place.size, master))
    hellos = {number: arrival.hello for number, arrival in come.items()}
    names = {0: place.address} | {number: hello.address for number, hello in hellos.items()}
    peers = place.group({number: arrival.link for number, arrival in come.items()}, names, listener)
    peers.pools = {0: listener.where} | {number: hello.pool for number, hello in hellos.items()}
    peers.listeners = {0: place.listener or meeting.Where()}
    peers.listeners |= {number: hello.listener for number, hello in hellos.items()}
    peers.without_save_dir = [number for number, hello in hellos.items() if not hello.shares]
    return peers


def _gather(listener: Listener, size: int, limit_s: float, announce: Callable[[], None]) -> list[_Arrival]:
    """Those of the other agents that come in time, by their numbers; who comes later is let in to wait for slots."""
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
    return [arrival for _, arrival in sorted(arrivals.items())]


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


def _why_not(occasion: Occasion, place: Place, arrivals: Sequence[_Arrival]) -> meeting.Rejected | None:
    """Why the agents that have come are no group: too few, or what differs between nodes; None if they are one."""
    least, came = occasion.least or place.size, 1 + len(arrivals)
    if came < least:
        needed = "all" if least == place.size else f"at least {least}"
        return meeting.Rejected(f"{came} of {place.size} nodes came within {occasion.limit_s:.0f} s; {needed} must", "")
    for _, hello, ahead_s in () if occasion.least else arrivals:
        if abs(ahead_s) > CLOCK_LIMIT_S:
            off = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
            why = f"the clock of node {hello.node} ({hello.address}) is {off} that of node 0 ({place.address})"
            return meeting.Rejected(why, "set the clocks of all nodes, by NTP for example")
        why_not = why_unfit(hello, place.alike, place.listener is not None, f"node 0 ({place.address})")
        if why_not is not None:
            return why_not
    return None


def refuse(refusal: meeting.Rejected) -> NoReturn:
    """Raise ConfigError, or NotMetError if there is nothing that a user could do."""
    raise ConfigError(refusal.reason, refusal.cure) if refusal.cure else NotMetError(refusal.reason)


def _follow(occasion: Occasion, place: Place) -> Peers:
    why, ends_s = "it is not known", time.monotonic() + occasion.limit_s + _FOLLOWERS_MORE_S
    while (left_s := ends_s - time.monotonic()) > 0:
        where = occasion.where()
        if isinstance(where, meeting.Rejected):
            refuse(where)
        if isinstance(where, meeting.Where):
            try:
                return _join(where, place, max(_TRY_AGAIN_S, left_s))
            except (OSError, EOFError) as error:  # of an earlier group, maybe: a new one comes in its place
                why = f"{where.address} port {where.port}: {error}"
        time.sleep(_TRY_AGAIN_S)
    raise NotMetError(f"the agent that leads cannot be reached ({why})")


def _join(where: meeting.Where, place: Place, limit_s: float) -> Peers:
    with contextlib.ExitStack() as undone:
        listener = place.open_listener()
        undone.callback(listener.close)
        link = connect(where, place.hello(listener), limit_s)
        undone.callback(link.close)
        answer: Any = link.receive_with_fds()[0]
        if isinstance(answer, meeting.Rejected):
            refuse(answer)
        if isinstance(answer, meeting.Deposed):
            raise NotMetError(answer.reason)
        if not isinstance(answer, meeting.Accepted):
            raise OSError(f"an answer that is none: {answer}")
        undone.pop_all()
    place = replace(place, number=answer.node, size=answer.size, master=answer.master)
    return place.group({0: link}, {0: where.address, place.number: place.address}, listener)


def connect(where: meeting.Where, hello: meeting.Hello, limit_s: float) -> Channel:
    """Connect to the agent that listens there, and say who comes. Each wait for it, here and later, has this limit.

    Raises OSError.
    """
    sock = socket.create_connection((where.address, where.port), timeout=limit_s)
    keep_alive(sock)
    link, shares = Channel(sock, KNOWN), bool(where.seen) and os.path.exists(where.seen)
    link.send(structs.replace(hello, token=where.token, shares=shares, at_s=time.time()))
    return link


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
