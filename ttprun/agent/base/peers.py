"""The agents of the other nodes, for as long as a group of ranks lives: one TCP connection each, to the leader alone.

One agent leads, at first that of the first node: the state machine runs there, with a row of each rank. Every
other agent is a follower (`agent.py`); `coordinator.py` is the other end. A job on one node has no peers. What crosses
nodes is in `ttprun.protocol.meeting` and `node_messages`. Begin with `Peers.watch`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ttprun.agent.base.loop import unwatch
from ttprun.agent.base.spare_pool import HUNG_UP, SparePool, retransmit_soon
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.channel import Channel
from ttprun.protocol.codec import Refused, encode
from ttprun.protocol.patience import Patience

SILENT_LIMIT_S = 15.0  # a node that is not heard for so long is lost: its agent reports a few times a second
_UNACKNOWLEDGED_LIMIT_S = 5.0  # a node that cannot be reached is lost sooner: its kernel would have answered
_FLUSH_LIMIT_S = 2.0
_PACKED_FROM, _LONGEST, _FAST = 8 << 10, 256 << 20, 1  # bytes, bytes, level
_ENDED_AFTER_S = 60.0  # an agent that reaches nobody has ended by then
Take = Callable[[int, Any], None]
Lose = Callable[[int, str], None]


class Peers:
    """The connections of this node's agent.

    node            number of this node in the group
    address         of this node, for the ranks of the others; "" in a job on one node
    ranks_per_node  the same on all nodes
    names           of the nodes, for people, by number
    size            number of nodes
    leader          number of the node whose agent leads
    pools           where the agents of the nodes listen, by number: the next one leads if the leader is lost
    master          address and port for the environment of new ranks
    others          agents that may live beside those with pools, as far as this one knows
    has_lost        some node of the group has been lost, perhaps the one that has the rendezvous store
    cut_off         lost nodes that did not answer any more: their agents may live, and go on
    without_save_dir  nodes that do not share the directory in which the leader keeps checkpoints
    listeners           where each agent would listen if it led the next group, by node; on the leader
    """

    def __init__(
        self,
        node: int = 0,
        address: str = "",
        ranks_per_node: int = 0,
        links: Mapping[int, Channel] | None = None,
        names: Mapping[int, str] | None = None,
        size: int = 1,
        pool: SparePool | None = None,
        master: str = "",
        leader: int = 0,
    ) -> None:
        """`links`: on the leader those of all followers, on a follower that of the leader.

        pool     of launchers that wait for slots; on a follower it is not open
        master   see `meeting.RankSlots`
        """
        self.node = node
        self.address = address
        self.ranks_per_node = ranks_per_node
        self.names = dict(names or {})
        self.size = size
        self._links = dict(links or {})
        self._heard_s = dict.fromkeys(self._links, time.monotonic())
        self._waits: dict[int, Patience] = {}  # for nodes to be heard again
        self.leader = leader
        self.pools: dict[int, meeting.Where] = {}
        self.others = 0
        self.has_lost = False
        self.cut_off: set[int] = set()
        self._out_of_reach_s: list[float] = []
        self.pool = pool
        self.without_save_dir: list[int] = []
        self.listeners: dict[int, meeting.Where] = {}
        self._listen: Callable[[int], None] = lambda node: None
        self.master = master
        self._last_word: meeting.Concluded | None = None
        self._encoded: tuple[Any, str] = (None, "")  # the newest message to a process of another node
        self._forwards: dict[int, node_messages.Forward] = {}  # by node: not sent yet, as more ranks may get the same

    @property
    def is_follower(self) -> bool:
        """Another agent leads."""
        return self.node != self.leader

    def watch(
        self,
        selector: selectors.BaseSelector,
        take: Take,
        lose: Lose,
        came: Callable[[str], None],
    ) -> None:
        """Listen to all peers from now on; if this agent leads, also to who waits for slots.

        take   called with a node and its message
        lose   called with a node whose connection has ended, and why
        came   called with the address of a node that waits for slots
        """
        self._listen = lambda node: self._listen_to(node, selector, take, lose)
        for node in list(self._links):
            self._listen(node)
        if self.pool is not None and not self.is_follower:
            self.pool.watch(selector, came)

    def _listen_to(self, node: int, selector: selectors.BaseSelector, take: Take, lose: Lose) -> None:
        link = self._links[node]
        selector.register(link.sock, selectors.EVENT_READ, self._reader(selector, node, link, take, lose))
        for message in link.read_kept():
            take(node, unpacked(message, link))

    def _reader(
        self, selector: selectors.BaseSelector, node: int, link: Channel, take: Take, lose: Lose
    ) -> Callable[[], None]:
        def read() -> None:
            try:
                messages = link.read_available()
            except (EOFError, OSError) as error:
                unwatch(selector, link.sock)
                self._links.pop(node, None)
                link.close()
                if isinstance(error, OSError) and error.errno not in HUNG_UP:
                    self.note_out_of_reach(node)
                lose(node, "its agent has closed the connection" if isinstance(error, EOFError) else str(error))
                return
            self._heard_s[node] = time.monotonic()
            self._waits.pop(node, None)
            for message in messages:
                take(node, unpacked(message, link))

        return read

    def note_pools(self, new: meeting.SparePools) -> None:
        """The leader says where all agents listen."""
        self.has_lost = self.has_lost or any(new.pools.get(number) != pool for number, pool in self.pools.items())
        self.cut_off.clear()
        self.pools, self.listeners = new.pools, new.listeners
        self.names |= {number: pool.address for number, pool in new.pools.items()}
        self.others = new.others

    def hang_up(self, node: int, selector: selectors.BaseSelector, why: str) -> None:
        """A node is lost: nothing that it may still send is heard. If its agent lives, it learns why.

        node       its number
        selector   of this agent, in which its connection is registered
        why        a sentence
        """
        self.send(node, meeting.Deposed(why))
        self.has_lost = True
        self._waits.pop(node, None)
        link = self._links.pop(node, None)
        if link is not None:
            unwatch(selector, link.sock)
            link.close()

    def is_connected(self, node: int) -> bool:
        """The agent of this node is there."""
        return node == self.node or node in self._links

    def holder_of(self, rank: int) -> int | None:
        """The node that has a rank's records: its own, or the next one, which keeps copies; None: both are lost."""
        node = self.node_of(rank)
        return next((number for number in (node, (node + 1) % self.size) if self.is_connected(number)), None)

    def slot(self, node: int, may: Callable[[str], bool]) -> str | None:
        """Give the slots of a lost node to the launcher that has waited longest.

        may       whether the node of an address may train

        returns   the address of its node; None if nobody waits that may
        """
        newcomer = None if self.pool is None else self.pool.take(may)
        if newcomer is None:
            return None
        self._links[node] = ready(newcomer.link)
        self.cut_off.discard(node)
        self.names[node] = newcomer.address
        self.pools[node], self.listeners[node] = newcomer.pool, newcomer.listener
        self._heard_s[node] = time.monotonic()
        self.send(node, meeting.RankSlots(node, self.size, self.ranks_per_node, self.names, self.master, self.leader))
        self._listen(node)
        return newcomer.address

    def follow(self, leader: int, link: Channel) -> None:
        """The agent that led is lost: this one leads next, on another node."""
        self.leader = leader
        self._links = {leader: ready(link)}
        self._heard_s[leader] = time.monotonic()
        self._waits.clear()
        self._listen(leader)

    def lead(self, links: Mapping[int, Channel]) -> None:
        """The agent that led is lost: this one leads next. Then `watch`."""
        self.leader = self.node
        self._links = {number: ready(link) for number, link in links.items()}
        self._heard_s |= dict.fromkeys(links, time.monotonic())
        self._waits.clear()
        if self.pool is not None:
            self.pools[self.node] = self.pool.listener.where

    def conclude(self, last_word: meeting.Concluded) -> None:
        """The group has come to its end; if this agent leads, whoever waits hears it when it hangs up."""
        if not self.is_follower:
            self._last_word = last_word
            self.to_all(last_word)

    def note_out_of_reach(self, node: int) -> None:
        """An agent cannot be reached: it may live, and go on without this one."""
        self.cut_off.add(node)
        self._out_of_reach_s.append(time.monotonic())

    @property
    def reach(self) -> tuple[int, int]:
        """On the leader: (agents that it reaches, itself among them; all of which it knows that may still live)."""
        reached = 1 + len(self._links) + (0 if self.pool is None else len(self.pool))
        lost_s = [*self._out_of_reach_s, *(() if self.pool is None else self.pool.out_of_reach_s)]
        return reached, reached + sum(at_s > time.monotonic() - _ENDED_AFTER_S for at_s in lost_s)

    def silent(self, has_stepped: bool) -> list[int]:
        """Nodes that have not been heard for too long, while nothing has shown that their ranks live.

        has_stepped   the job has completed a step since this was asked last

        Each step of the job shows it: an agent that is paused is no lost node. To be asked a few times a second.
        """
        if has_stepped:
            self._waits.clear()
        self._waits = {node: self._waits.get(node) or Patience(SILENT_LIMIT_S) for node in self._links}
        return Patience.over(self._waits)

    def unheard_s(self, node: int) -> float:
        """Seconds since a node was heard."""
        now = time.monotonic()
        return now - self._heard_s.get(node, now)

    def node_of(self, rank: int) -> int:
        """The number of the node on which a rank is."""
        return rank // self.ranks_per_node

    def name_of(self, node: int) -> str:
        """A node for people."""
        return f"node {node} ({self.shown(node)})"

    def shown(self, node: int) -> str:
        """The name of a node for people: the scheduler's, else its address."""
        pool = self.pools.get(node)
        return (pool.name if pool is not None else "") or self.names.get(node, "unknown")

    @property
    def leaders_name(self) -> str:
        """The node whose agent leads, for people."""
        return self.name_of(self.leader)

    def to_leader(self, message: node_messages.OfFollower) -> None:
        """Send to the leader."""
        self.send(self.leader, message)

    def to_all(self, message: node_messages.OfFollower | node_messages.OfLeader, but: int = -1) -> None:
        """Send to all agents that this one is connected to, or to all but one: the followers, or the leader."""
        if not self._links:
            return
        line = packed(encode(message))
        for node, link in list(self._links.items()):
            if node != but and link is not None:
                self._send_forward(node)
                link.send_line(line)

    @property
    def connected(self) -> list[int]:
        """The nodes to whose agents this one is connected: all others, or the leader's."""
        return list(self._links)

    def send(self, node: int, message: node_messages.OfFollower | node_messages.OfLeader) -> None:
        """Send to the agent of a node; what is for one that is lost is dropped."""
        self._send_forward(node)
        link = self._links.get(node)
        if link is not None:
            link.send(message)

    def forward(self, rank: int, pid: int, line: str) -> None:
        """Send to a process of another node, with whatever else is sent there, or by `flush`."""
        node = self.node_of(rank)
        waiting = self._forwards.get(node)
        if waiting is not None and waiting.line == line:
            waiting.to.append((rank, pid))
            return
        self._send_forward(node)
        self._forwards[node] = node_messages.Forward([(rank, pid)], line)

    def line_of(self, message: Any) -> str:
        """A message to a process, encoded; the same one for many ranks once."""
        if message is not self._encoded[0]:
            self._encoded = message, node_messages.encoded(message, self.size * self.ranks_per_node)
        return self._encoded[1]

    def _send_forward(self, node: int) -> None:
        waiting, link = self._forwards.pop(node, None), self._links.get(node)
        if waiting is not None and link is not None:
            link.send(waiting)

    def flush(self) -> None:
        """Send what had to be kept."""
        for node in list(self._forwards):
            self._send_forward(node)
        for link in self._links.values():
            link.flush()

    def close(self, selector: selectors.BaseSelector) -> None:
        """The group has ended: send what is left, and hang up."""
        self.flush()
        for link in self._links.values():
            unwatch(selector, link.sock)
            with contextlib.suppress(OSError):
                link.sock.settimeout(_FLUSH_LIMIT_S)
                link.finish()
            link.close()
        self._links.clear()
        if self.pool is not None:
            self.pool.close(self._last_word)


def packed(line: bytes) -> bytes:
    """A line to all nodes as it is sent: a long one, which has the same of many ranks, is some tenth as long."""
    return line if len(line) < _PACKED_FROM else encode(meeting.Packed(zlib.compress(line, _FAST)))


def unpacked(message: Any, link: Channel) -> Any:
    """A message as it was before it was packed, if it was; or `Refused`."""
    if not isinstance(message, meeting.Packed):
        return message
    unpacking = zlib.decompressobj()
    try:
        line = unpacking.decompress(message.line, _LONGEST)
    except zlib.error as error:
        return Refused(f"a packed message cannot be read: {error}")
    if not unpacking.eof:
        return Refused("a packed message is cut off, or too long")
    inner = link.read_line(line.rstrip(b"\n"))
    return Refused("a message is packed twice") if isinstance(inner, meeting.Packed) else inner


def ready(link: Channel) -> Channel:
    """A connection as the supervisor's selector wants it: nobody waits for it."""
    sock = link.sock
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_LIMIT_S * 1000))
    retransmit_soon(sock)
    link.waits = False
    return link
