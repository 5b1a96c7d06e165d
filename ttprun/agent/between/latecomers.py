"""Launchers that come while the job runs: how they find it, and how they wait for slots.

If the rendezvous store is lost with its node, the agent that leads serves another one. Who comes later finds that by
the leader's file in the save directory, or by the hosts that the discovery command names; else it would wait for a
store that does not come back, or start the job a second time (`JobFinder`). A launcher without slots waits in the spare
pool of the group (`spare_pool.py`); if its leader is lost, in the next one's (`wait_for_slots`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from msgspec.structs import replace
from torch._C._distributed_c10d import TCPStore

from ttprun.agent.base.peers import Peers
from ttprun.agent.base.spare_pool import Listener, RendezvousKeys, read_where, write_where
from ttprun.agent.between.rendezvous import Place, connect, refuse
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.channel import Channel
from ttprun.protocol.standby_messages import WarmUp

logger = logging.getLogger("ttprun")
LATE_LIMIT_S = 30.0  # another one leads by then
_ASK_LIMIT_S = 5.0
_LOOK_AGAIN_S = 0.5
_SILENT_S = 2.0  # a wait that is longer is said
_AT_A_TIME = 16


class MovedStore:
    """The store that this agent serves when it leads.

    port      of the rendezvous; another one if it is taken here
    run_id    of the job (--rdzv-id)
    arrived   launchers that a job needs
    file      in the save directory; "": there is none
    """

    def __init__(self, port: int, run_id: str, arrived: int, file: str) -> None:
        self._port = port
        self._run_id = run_id
        self._arrived = arrived
        self._file = file
        self._store: TCPStore | None = None
        self._token = ""

    def announce(self, address: str, where: meeting.Where) -> None:
        """This agent leads: serve the store, and name the spare pool there and in the file.

        address   of this node

        Raises what torch's stores do.
        """
        arrived = 0 if self._store is not None else self._arrived
        if self._store is None:
            self._store = self._served(address)
        self._token = where.token
        RendezvousKeys(self._store, self._run_id).announce(where, arrived)
        if self._file:
            write_where(self._file, replace(where, store=f"{address}:{self._store.port}"))

    def withdraw(self) -> None:
        """The job has ended under this agent: nobody is to look for it. The file may be another leader's."""
        where = read_where(self._file) if self._file else None
        if where is not None and where.token == self._token:
            with contextlib.suppress(OSError):
                os.unlink(self._file)

    def _served(self, address: str) -> TCPStore:
        with contextlib.suppress(Exception):  # that port is taken, on one machine; torch raises errors of its own
            return TCPStore(address, self._port, is_master=True, wait_for_workers=False, multi_tenant=True)
        return TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)


class JobFinder:
    """Finds the store of a job that runs.

    endpoint   of the rendezvous, host:port
    run_id     of the job (--rdzv-id)
    file       the leader's; "": there is none
    hosts      returns those that may train
    is_host    this launcher serves the store of the rendezvous
    """

    def __init__(
        self, endpoint: str, run_id: str, file: str, hosts: Callable[[], Iterable[str]], is_host: bool
    ) -> None:
        self._host, _, port = endpoint.rpartition(":")
        self._port = int(port) if port.isdecimal() else 0
        self._run_id = run_id
        self._file = file
        self._hosts = hosts
        self._is_host = is_host

    def find_at_start(self) -> str:
        """As `find`, before this launcher takes part in the rendezvous.

        Blocks while the job saves its state and ends, and for LATE_LIMIT_S if neither it nor the store can be reached.
        """
        has_ended, is_said = False, False
        ends_s = time.monotonic() + LATE_LIMIT_S
        while not (endpoint := self.find()):
            if isinstance(self._ask_leader(), meeting.Concluded):
                if not has_ended:
                    logger.warning("the job is ending: this launcher waits for that, and then starts it again")
                has_ended, ends_s = True, time.monotonic() + LATE_LIMIT_S
            elif time.monotonic() > ends_s or not self._is_awaited(has_ended):
                return ""
            elif not is_said and time.monotonic() > ends_s - LATE_LIMIT_S + _SILENT_S:
                is_said = True
                where = f"{self._host}:{self._port}"
                logger.warning("nobody answers at %s: looking for %.0f s whether the job runs", where, LATE_LIMIT_S)
            time.sleep(_LOOK_AGAIN_S)
        return endpoint

    def _is_awaited(self, has_ended: bool) -> bool:
        """Whether the rendezvous is not to be entered yet.

        has_ended   the job was here, and its launchers are leaving: the store of the one that had it goes last
        """
        if has_ended and _has_job(self._host, self._port, self._run_id):
            return True
        return not self._is_host and not _answers(self._host, self._port)

    def find(self) -> str:
        """host:port of the store that the agent that leads serves; "": none is known, or can be reached."""
        if isinstance(self._ask_leader(), meeting.Accepted):
            where = read_where(self._file)
            return "" if where is None else where.store
        named = [host for host in dict.fromkeys(self._hosts()) if host != self._host]
        if not named or not self._port or (not self._is_host and _answers(self._host, self._port)):
            return ""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            have_job = list(pool.map(lambda host: _has_job(host, self._port, self._run_id), named))
        return next((f"{host}:{self._port}" for host, has_job in zip(named, have_job, strict=True) if has_job), "")

    def _ask_leader(self) -> meeting.Accepted | meeting.Concluded | None:
        where = read_where(self._file) if self._file else None
        return None if where is None else _asked(where)


def _asked(where: meeting.Where) -> meeting.Accepted | meeting.Concluded | None:
    """Whether a job goes on, as its leader says; None if that cannot be reached, or does not know the token."""
    with contextlib.suppress(OSError, EOFError):
        with contextlib.closing(connect(where, meeting.Hello("", meeting.ASKS, "", {}), _ASK_LIMIT_S)) as link:
            answer: Any = link.receive_with_fds()[0]
        return answer if isinstance(answer, meeting.Accepted | meeting.Concluded) else None
    return None


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host or "localhost", port), timeout=_ASK_LIMIT_S).close()
        return True
    return False


def _has_job(host: str, port: int, run_id: str) -> bool:
    """A running job is named in the store of a host."""
    if not _answers(host, port):
        return False
    with contextlib.suppress(Exception):  # torch raises errors of its own
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_ASK_LIMIT_S))
        return RendezvousKeys(store, run_id).announced() is not None
    return False


_POOL_LIMIT_S = 10.0  # to be let in
_SUCCESSION_LIMIT_S = 30.0  # the same by an agent that may not know yet that it leads


@dataclass(frozen=True)
class Taken:
    """Slots of a lost node, which this one takes.

    records   of each of its ranks
    """

    peers: Peers
    records: Mapping[int, node_messages.Records]


TakeWarmth = Callable[[list[str], list[str]], None]
LOST = "lost"  # a kind, as in `Concluded`: the connection
Outcome = Taken | meeting.Regroup | meeting.Concluded


def wait_for_slots(where: meeting.Where, place: Place, warm_up: TakeWarmth) -> Outcome | None:
    """Wait in the spare pool of a group until slots become free, or until the group starts again with this node.

    where     the spare pool is, as it was announced
    place     of this node, which has no numbers yet
    warm_up   called with what standbys should import and compile

    returns   how the group has ended, if it did so first, or LOST if nobody can be reached any more; None: this
              launcher was not let in

    Blocks as long as nothing happens; a signal's handler may end it by an exception. Raises ConfigError if this node
    does not fit the others.
    """
    with contextlib.ExitStack() as undone:
        listener = place.open_listener()
        undone.callback(listener.close)
        outcome = _Waiting(place, listener, warm_up).wait(where)
        if isinstance(outcome, Taken):
            undone.pop_all()
    return outcome


class _Waiting:
    """A launcher that waits.

    listener   of its own, if it leads later
    """

    def __init__(self, place: Place, listener: Listener, warm_up: TakeWarmth) -> None:
        self._place = place
        self._listener = listener
        self._warm_up = warm_up
        self._others: Iterator[meeting.Where] = iter(())  # who may lead next
        self._was_let_in = False

    def wait(self, where: meeting.Where) -> Outcome | None:
        """As `wait_for_slots`."""
        limit_s = _POOL_LIMIT_S
        while True:
            with contextlib.suppress(OSError, EOFError):
                return self._wait_in(where, limit_s)
            following = next(self._others, None)
            if following is None:
                return meeting.Concluded(LOST, "nobody can be reached", True, 0) if self._was_let_in else None
            where, limit_s = following, _SUCCESSION_LIMIT_S

    def _wait_in(self, where: meeting.Where, limit_s: float) -> Outcome:
        """Wait in one spare pool. Raises OSError or EOFError if its agent is lost."""
        with contextlib.ExitStack() as undone:
            link = connect(where, self._place.hello(self._listener), limit_s)
            undone.callback(link.close)
            outcome = self._read(link, where.token)
            if isinstance(outcome, Taken):
                undone.pop_all()
        return outcome

    def _read(self, link: Channel, token: str) -> Outcome:
        slots: meeting.RankSlots | None = None
        records: dict[int, node_messages.Records] = {}
        while slots is None or len(records) < slots.ranks:
            message: Any = link.receive_with_fds()[0]
            match message:
                case meeting.Accepted():
                    link.sock.settimeout(None)
                    self._was_let_in = True
                case meeting.Rejected():
                    refuse(message)
                case meeting.Concluded() | meeting.Regroup():
                    return message
                case WarmUp(modules=modules, files=files):
                    self._warm_up(modules, files)
                case meeting.SparePools(pools=pools):
                    self._others = iter([pool for _, pool in sorted(pools.items()) if pool.token != token])
                case meeting.RankSlots():
                    slots = message
                case node_messages.Records(rank=rank):
                    records[rank] = message
        place = dataclasses.replace(
            self._place, number=slots.node, size=slots.size, ranks=slots.ranks, master=slots.master
        )
        peers = place.group({slots.leader: link}, slots.names, self._listener, slots.leader)
        peers.has_lost = True
        return Taken(peers, records)
