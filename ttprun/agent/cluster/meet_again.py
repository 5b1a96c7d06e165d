"""The agents of a group that has just ended meet again, some of them gone and others new (`--elastic`).

No rendezvous is needed: the agent that has led names the next leader, the place where that listens, and everybody's
number, in one order (`meeting.Regroup`). Who does not come in time is left out, as long as there are enough. Begin with
`meet_again`.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from ttprun.agent.cluster.peers import Peers, ready
from ttprun.agent.cluster.rendezvous import KNOWN, NotMetError, Place, address_for_ranks, listeners_of
from ttprun.agent.cluster.spare_pool import Listener, SparePool, keep_alive
from ttprun.protocol import meeting
from ttprun.protocol.channel import Channel

LIMIT_S = 30.0  # all have got the order at once, and have to end their ranks
_FOLLOWER_LIMIT_S = LIMIT_S + 10.0
_LOOK_AGAIN_S = 0.2


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
    return _lead(order, place, listener, make_store) if order.node == 0 else _follow(order, place)


def _lead(order: meeting.Regroup, place: Place, listener: Listener, make_store: Callable[[], str]) -> tuple[Peers, str]:
    arrivals: dict[int, tuple[Channel, meeting.Hello]] = {}
    ends_s = time.monotonic() + LIMIT_S

    def came(link: Channel, hello: meeting.Hello) -> None:
        if 0 < hello.node < order.size:
            arrivals[hello.node] = link, hello

    with selectors.DefaultSelector() as selector:
        listener.open(selector, came)
        while len(arrivals) < order.size - 1 and time.monotonic() < ends_s:
            for key, _ in selector.select(max(0.0, ends_s - time.monotonic())):
                key.data()
        listener.shut()
    size = 1 + len(arrivals)
    if size < order.least:
        why = f"{size} of at least {order.least} nodes came within {LIMIT_S:.0f} s"
        for link, _ in arrivals.values():
            link.send(meeting.Rejected(why, "start the launchers again: all resume from the checkpoint"))
            link.close()
        listener.close()
        raise NotMetError(why)
    master = make_store()
    links, names, hellos = {}, {0: place.address}, []
    for number, (_, (link, hello)) in enumerate(sorted(arrivals.items(), key=lambda arrival: arrival[0]), start=1):
        link.send(meeting.Accepted(number, size, master))
        links[number], names[number] = ready(link), hello.address
        hellos.append(structs.replace(hello, node=number))
    pool = SparePool(listener, place.alike, sees_needed=True)
    peers = Peers(0, address_for_ranks(place.address), place.ranks, links, names, size, pool, master)
    peers.listeners = listeners_of(place, hellos)
    peers.pools = {0: meeting.Where(**listener.where)} | {hello.node: hello.pool for hello in hellos}
    return peers, master


def _follow(order: meeting.Regroup, place: Place) -> tuple[Peers, str]:
    ends_s, why = time.monotonic() + _FOLLOWER_LIMIT_S, "it does not listen"
    while time.monotonic() < ends_s:
        try:
            return _connect(order, place, max(_LOOK_AGAIN_S, ends_s - time.monotonic()))
        except (OSError, EOFError) as error:
            why = str(error) or type(error).__name__
            time.sleep(_LOOK_AGAIN_S)
    raise NotMetError(f"{order.where.address}, whose agent would lead, cannot be reached ({why})")


def _connect(order: meeting.Regroup, place: Place, limit_s: float) -> tuple[Peers, str]:
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
