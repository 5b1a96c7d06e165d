"""Where launchers wait that have no slots in the group: hot spares, and nodes that come back.

The agent that leads listens as long as the group lives, and names the place in the rendezvous store. Who waits is a
connection and the address of a node; nothing is sent before slots become free. Begin with `SparePool.watch`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttprun.agent.base.loop import unwatch
from ttprun.protocol import meeting
from ttprun.protocol.channel import Channel
from ttprun.protocol.codec import decode_fields, encode
from ttprun.protocol.standby_messages import WarmUp

_POOL, _ARRIVALS = "ttprun/spare-pool", "ttprun/arrivals"
_BACKLOG = 1024
_NEWCOMERS = 16  # that have not said who they are; the oldest gives way to another
HUNG_UP = (errno.ECONNRESET, errno.EPIPE)  # the other end's kernel has said so: its process has ended, or wants no more
# Three seconds without a network lose nobody, whenever they begin: a probe comes after them, and a retransmission.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5))
_RTO_MAX_MS, _RETRANSMIT_MS = 44, 1000  # Linux 6.15; before, waits double


Came = Callable[[Channel, meeting.Hello], None]


class Listener:
    """A listener that lets in who knows the token; who is silent holds up nobody.

    where            that is, for those who may come
    message_types    classes of the messages that agents send, by name
    """

    def __init__(self, address: str, message_types: Mapping[str, type], page: str = "", seen: str = "") -> None:
        """`page`, `seen`: as in `meeting.Where`."""
        self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self._known = message_types
        self._newcomers: list[Channel] = []
        self._selector: selectors.BaseSelector | None = None
        self._came: Came = lambda link, hello: None
        port, token, name = (
            self._listener.getsockname()[1],
            secrets.token_hex(16),
            os.environ.get("SLURMD_NODENAME", ""),
        )
        self.where = meeting.Where(address, port, token, page, name, seen)

    def open(self, selector: selectors.BaseSelector, came: Came) -> None:
        """Let them in by this selector from now on.

        came   called with each connection, which is not in the selector any more, and its first message
        """
        if self._selector is selector:  # who has come through, and not said anything yet, is kept
            self._came = came
            return
        self.shut()
        self._selector, self._came = selector, came
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._let_in)

    def _let_in(self) -> None:
        assert self._selector is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            keep_alive(sock)
            link = Channel(sock, self._known)
            self._newcomers.append(link)
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(link))
            if len(self._newcomers) > _NEWCOMERS:
                self._hang_up(self._newcomers[0])

    def _read(self, link: Channel) -> None:
        try:
            messages: list[Any] = link.read_available()
        except (EOFError, OSError):
            self._hang_up(link)
            return
        if not messages:
            return
        hello = messages[0]
        given = hello.token.encode(errors="surrogatepass") if isinstance(hello, meeting.Hello) else b""
        if not hmac.compare_digest(given, self.where.token.encode()):
            self._hang_up(link)
            return
        self._forget(link)
        link.put_back(messages[1:])
        self._came(link, hello)

    def _hang_up(self, link: Channel) -> None:
        self._forget(link)
        link.close()

    def _forget(self, link: Channel) -> None:
        assert self._selector is not None
        self._newcomers = [other for other in self._newcomers if other is not link]
        unwatch(self._selector, link.sock)

    def shut(self) -> None:
        """Nobody is let in until it is opened again."""
        if self._selector is not None:
            for link in list(self._newcomers):
                self._hang_up(link)
            unwatch(self._selector, self._listener)
            self._selector = None

    def close(self) -> None:
        """Listen no more."""
        self.shut()
        self._listener.close()


@dataclass(frozen=True)
class Waiting:
    """A launcher that waits.

    address   of its node
    listener      where its agent would listen if it led the next group
    since_s   when it came
    pool      where its agent listens if the one that leads is lost
    """

    link: Channel
    address: str
    listener: meeting.Where
    since_s: float
    pool: meeting.Where


class SparePool:
    """The spare pool of one group.

    listener          which its agents have come through before
    alike         what must be the same on all nodes, by its name for people
    sees_needed   who waits must see the save directory: its ranks will resume from there
    out_of_reach_s  when those were lost that cannot be reached any more
    is_ending     whether the job saves its state and ends: who comes then is for its next start
    """

    def __init__(self, listener: Listener, alike: Mapping[str, str], sees_needed: bool = False) -> None:
        self.listener = listener
        self._sees_needed = sees_needed
        self._alike = dict(alike)
        self._waiting: list[Waiting] = []
        self._pools: meeting.SparePools | None = None
        self._came: Callable[[str], None] = lambda address: None
        self._selector: selectors.BaseSelector | None = None
        self._warmth: WarmUp | None = None
        self.out_of_reach_s: list[float] = []
        self.is_ending: Callable[[], bool] = lambda: False

    def warm_up(self, warmth: WarmUp) -> None:
        """Let all who wait know what their standbys should have imported; also those who come later."""
        self._warmth = warmth
        for launcher in self._waiting:
            launcher.link.send(warmth)

    def watch(self, selector: selectors.BaseSelector, came: Callable[[str], None]) -> None:
        """Let launchers in from now on.

        came   called with the address of each that waits
        """
        self._selector, self._came = selector, came
        self.listener.open(selector, self.let_in)

    def let_in(self, link: Channel, hello: meeting.Hello) -> None:
        """A launcher has come through the listener."""
        assert self._selector is not None
        answer = self._answer(hello)
        link.send(answer)
        if hello.node == meeting.ASKS or not isinstance(answer, meeting.Accepted):
            link.close()
            return
        self._waiting.append(Waiting(link, hello.address, hello.listener, time.monotonic(), hello.pool))
        self._selector.register(link.sock, selectors.EVENT_READ, lambda: self._hear(link))
        for message in (self._warmth, self._pools):
            if message is not None:
                link.send(message)
        self._came(hello.address)

    def _answer(
        self, hello: meeting.Hello
    ) -> meeting.Accepted | meeting.Rejected | meeting.Deposed | meeting.Concluded:
        if hello.node >= 0:
            return meeting.Deposed("its node was given up, and another one may have its slots")
        if self.is_ending():
            return meeting.Concluded("restart", "the job is ending", True, 0)
        why_not = None if hello.node == meeting.ASKS else why_unfit(hello, self._alike, self._sees_needed, "the job")
        return why_not or meeting.Accepted()

    def announce(self, pools: meeting.SparePools) -> None:
        """Let all who wait know where to go if this agent is lost; also those who come later."""
        self._pools, line = pools, encode(pools)
        for launcher in self._waiting:
            launcher.link.send_line(line)

    def _hear(self, link: Channel) -> None:
        """Who waits says nothing, so it has gone, or cannot be reached."""
        try:
            link.read_available()
        except EOFError:
            pass
        except OSError as error:
            if error.errno not in HUNG_UP:
                self.out_of_reach_s.append(time.monotonic())
        self._leave(link)

    def _leave(self, link: Channel) -> None:
        self._forget(link)
        link.close()

    def _forget(self, link: Channel) -> None:
        assert self._selector is not None
        unwatch(self._selector, link.sock)
        self._waiting = [launcher for launcher in self._waiting if launcher.link is not link]

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """Who waits, the first to come first."""
        return tuple(self._waiting)

    def take(self, may: Callable[[str], bool]) -> Waiting | None:
        """Of the launchers whose addresses may train, the one that has waited longest; None if there is none."""
        first = next((launcher for launcher in self._waiting if may(launcher.address)), None)
        if first is None:
            return None
        self._forget(first.link)
        return first

    def dismiss(self, launcher: Waiting, order: meeting.Regroup) -> None:
        """Who waits takes part in the next group."""
        launcher.link.send(order)
        self._leave(launcher.link)

    def close(self, last_word: meeting.Concluded | None) -> None:
        """The group has ended: report that to whoever waits, who then waits for another group, or for none."""
        for launcher in list(self._waiting):
            if last_word is not None:
                launcher.link.send(last_word)
            self._leave(launcher.link)
        self.listener.close()


def why_unfit(hello: meeting.Hello, alike: Mapping[str, str], is_shared: bool, leader: str) -> meeting.Rejected | None:
    """What differs between a node that has come and those that are there; None if they fit each other.

    alike      what must be the same on all nodes, by its name for people
    is_shared  so must the save directory
    leader     what those that are there are called
    """
    node = f"this node ({hello.address})" if hello.node < 0 else f"node {hello.node} ({hello.address})"
    if is_shared and not hello.shares:
        reason = f"{node} does not see the save directory of {leader}"
        return meeting.Rejected(reason, "--elastic needs one that all nodes share (--save-dir)")
    for name, ours in alike.items():
        theirs = hello.alike.get(name, "")
        if theirs != ours:
            reason = f"{leader} and {node} differ in {name}: {ours} and {theirs}"
            return meeting.Rejected(reason, "start the same on every node")
    return None


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice that the other end cannot be reached any more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    retransmit_soon(sock)


def retransmit_soon(sock: socket.socket) -> None:
    """Have the kernel try again every second: else it may be silent for seconds after a network is there again."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _RETRANSMIT_MS)


class RendezvousKeys:
    """Where launchers learn of a job that runs: keys in the rendezvous store that all its groups share.

    store    of the rendezvous
    run_id   of the job (--rdzv-id)
    """

    def __init__(self, store: Any, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    def arrive(self) -> int:
        """This launcher is there; returns how many have come before it and with it. Raises what the store does."""
        number: int = self._store.add(f"{_ARRIVALS}/{self._run_id}", 1)
        return number

    def announce(self, where: meeting.Where, arrived: int = 0) -> None:
        """Name the spare pool of a group that starts. Raises what the store does.

        arrived   launchers that have come by another store
        """
        if arrived:
            self._store.add(f"{_ARRIVALS}/{self._run_id}", arrived)
        self._store.set(f"{_POOL}/{self._run_id}", encode(where).decode())

    def announced(self) -> meeting.Where | None:
        """Where the newest spare pool is, if any was announced."""
        key = f"{_POOL}/{self._run_id}"
        with contextlib.suppress(Exception):  # torch's stores raise errors of their own
            if self._store.check([key]):
                return _where(self._store.get(key))
        return None


def write_where(file: str, where: meeting.Where) -> None:
    """Name the spare pool of a group in the leader's file, for who cannot reach the store. A full disk costs that."""
    with contextlib.suppress(OSError):
        draft = Path(f"{file}-{secrets.token_hex(4)}")
        draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.touch(mode=0o600)  # it has the token
        draft.write_bytes(encode(where))
        draft.replace(file)


def read_where(file: str) -> meeting.Where | None:
    """Where a spare pool is or was, according to a leader's file; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # another program has written it
        return _where(Path(file).read_bytes())
    return None


def _where(line: bytes) -> meeting.Where | None:
    where = decode_fields(dict(json.loads(line)), {"Where": meeting.Where})
    return where if isinstance(where, meeting.Where) else None
