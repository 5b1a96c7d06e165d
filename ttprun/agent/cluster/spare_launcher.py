"""A launcher without slots waits in the spare pool of a group (`spare_pool.py`); if its leader is lost, in
the next one's.

Begin with `wait_for_slots`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict, replace

from ttprun.agent.cluster.peers import Peers, ready
from ttprun.agent.cluster.rendezvous import KNOWN, address_for_ranks
from ttprun.agent.cluster.spare_pool import Listener, SparePool, keep_alive
from ttprun.errors import ConfigError
from ttprun.protocol import meeting, node_reports
from ttprun.protocol.channel import Channel
from ttprun.protocol.standby_messages import WarmUp

_POOL_LIMIT_S = 10.0  # to be let in
_SUCCESSION_LIMIT_S = 30.0  # the same by an agent that may not know yet that it leads


@dataclass(frozen=True)
class Taken:
    """Slots of a lost node, which this one takes.

    records   of each of its ranks
    """

    peers: Peers
    master: str
    records: Mapping[int, node_reports.Records]


TakeWarmth = Callable[[list[str], list[str]], None]
LOST = "lost"  # a kind, as in `Concluded`: the connection
Outcome = Taken | meeting.Regroup | meeting.Concluded


def wait_for_slots(
    where: Mapping[str, Any],
    address: str,
    alike: Mapping[str, str],
    warm_up: TakeWarmth,
    listener: meeting.Where | None = None,
    page: str = "",
) -> Outcome | None:
    """Wait in the spare pool of a group until slots become free, or until the group starts again with this node.

    where     the spare pool is, as it was announced
    address   of this node
    warm_up   called with what standbys should import and compile
    listener, page   as in `Place`

    returns   how the group has ended, if it did so first, or LOST if nobody can be reached any more; None: this
              launcher was not let in

    Blocks as long as nothing happens; a signal's handler may end it by an exception. Raises ConfigError if this node
    does not fit the others.
    """
    pool = SparePool(Listener(address, KNOWN, page), alike)
    try:
        shares = bool(where.get("seen")) and os.path.exists(where["seen"])
        own = meeting.Where(**pool.listener.where)
        hello = meeting.Hello("", -1, address, dict(alike), shares, listener=listener or meeting.Where(), pool=own)
        outcome = _Waiting(hello, pool, warm_up).wait(where)
    except BaseException:
        pool.listener.close()
        raise
    if not isinstance(outcome, Taken):
        pool.listener.close()
    return outcome


class _Waiting:
    """A launcher that waits.

    hello   what it says where it comes
    pool    of its own, if it leads later
    """

    def __init__(self, hello: meeting.Hello, pool: SparePool, warm_up: TakeWarmth) -> None:
        self._hello = hello
        self._pool = pool
        self._warm_up = warm_up
        self._others: Iterator[meeting.Where] = iter(())  # who may lead next
        self._was_let_in = False

    def wait(self, where: Mapping[str, Any]) -> Outcome | None:
        """As `wait_for_slots`."""
        limit_s = _POOL_LIMIT_S
        while True:
            with contextlib.suppress(OSError, EOFError):
                return self._wait_in(where, limit_s)
            following = next(self._others, None)
            if following is None:
                return meeting.Concluded(LOST, "nobody can be reached", True, 0) if self._was_let_in else None
            where, limit_s = asdict(following), _SUCCESSION_LIMIT_S

    def _wait_in(self, where: Mapping[str, Any], limit_s: float) -> Outcome:
        """Wait in one spare pool. Raises OSError or EOFError if its agent is lost."""
        link = Channel(socket.create_connection((where["address"], where["port"]), timeout=limit_s), KNOWN)
        try:
            keep_alive(link.sock)
            link.send(replace(self._hello, token=where["token"], at_s=time.time()))
            return self._read(link, where["token"])
        except BaseException:
            link.close()
            raise

    def _read(self, link: Channel, token: str) -> Outcome:
        slots: meeting.RankSlots | None = None
        records: dict[int, node_reports.Records] = {}
        while slots is None or len(records) < slots.ranks:
            message: Any = link.receive_with_fds()[0]
            match message:
                case meeting.Accepted():
                    link.sock.settimeout(None)
                    self._was_let_in = True
                case meeting.Rejected(reason=reason, cure=cure):
                    raise ConfigError(reason, cure)
                case meeting.Concluded() | meeting.Regroup():
                    link.close()
                    return message
                case WarmUp(modules=modules, files=files):
                    self._warm_up(modules, files)
                case meeting.SparePools(pools=pools):
                    self._others = iter([pool for _, pool in sorted(pools.items()) if pool.token != token])
                case meeting.RankSlots():
                    slots = message
                case node_reports.Records(rank=rank):
                    records[rank] = message
        own, links, size = address_for_ranks(self._hello.address), {slots.leader: ready(link)}, slots.size
        peers = Peers(
            slots.node, own, slots.ranks, links, slots.names, size, self._pool, slots.master, leader=slots.leader
        )
        peers.has_lost = True
        return Taken(peers, slots.master, records)
