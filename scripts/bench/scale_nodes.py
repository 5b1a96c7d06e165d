"""Stand-ins for all nodes of a job but the leader's, and for all ranks: they say what agents and ranks would say.

One process plays them all, with the wire's own messages over real connections. It is started by `scale_leader.py`, and
takes one command a line on stdin: see `Stage.obey`. A rank is a number here: it computes nothing, and answers each
order at once. Begin with `Node.take`.
"""

from __future__ import annotations

import json
import re
import select
import selectors
import socket
import sys
import time
import zlib
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import count
from typing import Any

from ttprun.agent.between import agent
from ttprun.protocol import channel, from_rank, meeting, node_messages, process_orders, to_rank
from ttprun.protocol.board import SHARED, Board, Field, Phase
from ttprun.protocol.codec import Message, decode, encode
from ttprun.protocol.node_messages import in_full
from ttprun.protocol.rank_events import RankExited, RankStarted

PARAMETERS = 16  # that a rank reports digests of
ISSUED = 20  # collectives since the boundary, in a survivor's journal
RECORD = "x" * 16_384  # of a lost rank, as its copy comes from another node
DIGEST = "d" * 16
ROW_TEXTS: dict[tuple[int, int], str] = {}
AWAITED = ", awaited"  # rows for which ranks of other nodes wait
KNOWN = {kind.__name__: kind for kind in node_messages.OfLeader.__args__}  # type: ignore[attr-defined]
RANKS = re.compile(rb'"rank": (\d+)')
PUTS = re.compile(rb'"key": "port (\d+)"')


@cache
def of_journal(world_size: int) -> dict[str, from_rank.GroupJournal]:
    """What each survivor has issued in its step."""
    issued = [f"allreduce float32 [{1 << 20}, {number}]" for number in range(ISSUED)]
    return {"world": from_rank.GroupJournal(list(range(world_size)), issued)}


class Rank:
    """A rank's stand-in: what it reports goes to `say`.

    say        sends a message of the rank
    share      sends its row to all other nodes at once
    heard      ranks whose ports it knows, in this generation
    held       ranks that are known to have stopped before their commit
    """

    pids = count(1_000_000)

    def __init__(self, rank: int, world_size: int, say: Callable[[Message], None], share: Callable[[], None]) -> None:
        self.rank, self.world_size, self.say, self.share = rank, world_size, say, share
        self.pid = 0
        self.boundary = 5
        self.generation = 0
        self.connects = -1  # generation

    def begin(self, pid: int) -> None:
        """The process has been welcomed."""
        self.pid = pid
        for message in (from_rank.Present(pid, 1), from_rank.RankProtected()):
            self.say(message)

    def join(self) -> None:
        """The script makes its process group."""
        self.say(from_rank.RankJoined())
        self.connect(0)

    def connect(self, generation: int) -> None:
        """Let all others know the port."""
        self.connects = generation
        self.say(from_rank.Put(generation, f"port {self.rank}", b"29500"))

    def take(self, order: Any) -> None:
        """An order of the agent."""
        generation = getattr(order, "generation", 0)
        match order:
            case to_rank.Freeze():
                self.generation = generation
                self.share()
                self.say(from_rank.RankFrozen(generation, self.boundary, DIGEST, True, of_journal(self.world_size)))
            case to_rank.Replay(boundary=boundary):
                self.boundary = boundary
                self.say(from_rank.RankJoined())
                self.say(from_rank.RankReplayed(generation, boundary, 0.1))
            case to_rank.SendState():
                self.say(from_rank.StateSent(generation, DIGEST))
            case to_rank.FetchState():
                self.say(from_rank.RankRepaired(generation, DIGEST))
            case to_rank.Resume():
                self.generation = generation
                self.connect(generation)

    def connected(self) -> None:
        """It knows the ports of all others."""
        if self.connects == 0:  # the job begins: its first step follows
            digests = {f"layers.{number}.weight": (DIGEST, DIGEST) for number in range(PARAMETERS)}
            self.say(from_rank.Held(1, True, digests, {key: key for key in digests}, {}, [], ""))
        else:
            self.say(from_rank.RankRebuilt(self.connects))
            self.say(from_rank.RankReissued(self.connects))
        self.connects = -1


class Node:
    """The agent of a node, and its ranks.

    send        a message to the leader
    send_line   one that is encoded, with its name
    """

    def __init__(
        self, stage: Stage, number: int, send: Callable[[Message], None], send_line: Callable[[str, str], None]
    ) -> None:
        self.stage, self.number, self.send, self.send_line = stage, number, send, send_line
        self.ranks: dict[int, Rank] = {}
        self.ports: defaultdict[int, set[int]] = defaultdict(set)  # generation -> ranks
        self.wants_rows: set[int] = set()

    def fill(self) -> None:
        """The node has its slots."""
        first = self.number * self.stage.per_node
        for rank in range(first, first + self.stage.per_node):
            self.ranks[rank] = Rank(
                rank, self.stage.world_size, lambda message, rank=rank: self.say(rank, message),
                lambda rank=rank: self.share(rank),
            )  # fmt: skip

    def row(self, rank: int) -> node_messages.BoardRow:
        """How a rank stands: at work, and in no trouble."""
        now_ns, state = time.monotonic_ns(), self.ranks[rank]
        values = {
            Field.RECORDED: state.boundary,
            Field.APPLIED: state.boundary,
            Field.PHASE: Phase.COMPUTING,
            Field.COLLECTIVES: now_ns >> 20,
            Field.SEEN_NS: now_ns,
            Field.HELD: state.generation,
            Field.PULSE_NS: now_ns,
            Field.REHEARSED: 1,
            Field.STEPPED: state.boundary,
        }
        return node_messages.BoardRow(rank, [int(values.get(field, 0)) for field in SHARED], "S", now_ns / 1e9)

    def say(self, rank: int, message: Message) -> None:
        """A rank reports something."""
        if isinstance(message, from_rank.Put):
            self.note_ports(message.generation, {rank})
        inner = self.stage.encoded(message)
        pid, now_ns = self.ranks[rank].pid, time.monotonic_ns()
        said = f'{{"op": "Said", "rank": {rank}, "pid": {pid}, "message": {inner}, "now_ns": {now_ns}, '
        self.send_line("Said", f'{said}"rows": [{self.row_text(rank, now_ns)}]}}')

    def row_text(self, rank: int, now_ns: int) -> str:
        """As `row`, encoded: the stand-ins share a machine with the leader, and there are thousands of them."""
        state = self.ranks[rank]
        key = state.boundary, state.generation
        if key not in ROW_TEXTS:
            row = encode(self.row(rank)).decode().partition('"values": ')[2].rstrip("\n")
            ROW_TEXTS[key] = re.sub(r"\d{9,}", "{now}", row[:-1]).replace('"S", "cpu_s": ', '"S", "cpu_s": 1.0 #')
        values = ROW_TEXTS[key].partition("#")[0].replace("{now}", str(now_ns - 12_347 * rank))
        return f'{{"rank": {rank}, "values": {values}}}'

    def share(self, rank: int) -> None:
        """Ranks of other nodes wait for this row."""
        self.send_rows("Rows" + AWAITED, [rank], is_awaited=True)

    def begin(self, rank: int) -> None:
        """A rank has a process."""
        pid = next(Rank.pids)
        self.send(RankStarted(at_s=0.0, rank=rank, pid=pid))
        self.ranks[rank].begin(pid)

    def tick(self) -> None:
        """How all stand, as a sign of life."""
        self.send_rows("Rows", self.ranks, is_awaited=False)

    def send_rows(self, kind: str, ranks: Iterable[int], is_awaited: bool) -> None:
        """How ranks stand."""
        now_ns = time.monotonic_ns()
        rows = ", ".join(self.row_text(rank, now_ns) for rank in ranks)
        awaited = str(is_awaited).lower()
        self.send_line(kind, f'{{"op": "Rows", "now_ns": {now_ns}, "rows": [{rows}], "is_awaited": {awaited}}}')

    def note_ports(self, generation: int, ranks: Collection[int]) -> None:
        """Where ranks can be reached; once all are known, all of this node are connected."""
        ports = self.ports[generation]
        ports.update(ranks)
        if len(ports) == self.stage.world_size:
            for rank in self.ranks.values():
                if rank.connects == generation:
                    rank.connected()

    def kill(self, rank: int) -> None:
        """A rank's process gets SIGKILL."""
        state = self.ranks[rank]
        fields = {"rank": rank, "pid": state.pid, "boundary": state.boundary, "reason": "killed by signal 9"}
        ended = RankExited.ended(-9, at_s=0.0, **fields)
        self.share(rank)
        self.ranks[rank].pid = 0
        self.send(ended)

    def take(self, line: bytes, op: str) -> None:
        """A line of the leader. What is many and long is not read in full: the stand-ins' time is not measured."""
        if op == "Rows":
            return
        if op == "Broadcast":
            generation = int(re.search(rb'"generation": (\d+)', line)[1])  # type: ignore[index]
            self.note_ports(generation, self.stage.ports_in(line))
            return
        if op in ("Published", "SparePools", "Known"):
            return
        order = decode(line, KNOWN)
        match order:
            case node_messages.Begin():
                self.fill()
                for rank in self.ranks:
                    self.begin(rank)
            case node_messages.Forward():
                inner = in_full(decode(order.line.encode(), channel.KNOWN), self.stage.world_size)
                for rank, pid in order.to:
                    if self.ranks[rank].pid == pid:
                        if isinstance(inner, from_rank.Put):
                            self.note_ports(inner.generation, {int(inner.key.split()[1])})
                        else:
                            self.ranks[rank].take(inner)
            case process_orders.SpawnRank(rank=rank):
                self.begin(rank)
            case to_rank.Replay(rank=rank):
                self.ranks[rank].take(order)
            case node_messages.GiveRecords(ranks=ranks):
                for rank in ranks:
                    self.send(node_messages.Records(rank, RECORD))
            case meeting.RankSlots(node=number):
                self.number = number
                self.fill()
                self.stage.nodes[number] = self


class Link:
    """A node's connection: lines in, lines out, and what is counted of them."""

    def __init__(self, stage: Stage, where: dict[str, Any], number: int) -> None:
        self.stage = stage
        self.sock = socket.create_connection((where["address"], where["port"]))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.unread = b""
        self.unsent = bytearray()
        self.node = Node(stage, number, self.send, self.send_line)
        address = f"10.0.{max(number, 0) >> 8}.{number & 255}"
        hello = meeting.Hello(where["token"], number, address, {}, shares=True, at_s=time.time())
        self.send(hello)

    def send(self, message: Message) -> None:
        line = encode(message)
        self.stage.note("in", type(message).__name__, len(line))
        self.unsent += line
        self.stage.waiting.add(self)

    def send_line(self, op: str, text: str) -> None:
        self.stage.note("in", op, len(text) + 1)
        self.unsent += text.encode() + b"\n"
        self.stage.waiting.add(self)

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(memoryview(self.unsent)[: 1 << 20].tobytes())]
            self.stage.waiting.discard(self)
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def read(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            size, op = len(line) + 1, line[8 : line.index(b'"', 8)].decode()
            if op == "Packed":
                line = self.stage.unpacked(line)
                op = line[8 : line.index(b'"', 8)].decode()
            is_awaited = op == "Rows" and line.endswith(b'"is_awaited": true}')
            self.stage.note("out", op + AWAITED * is_awaited, size)
            self.node.take(line, op)

    def close(self) -> None:
        if self.sock.fileno() < 0:
            return
        self.stage.waiting.discard(self)
        self.stage.selector.unregister(self.sock)
        self.sock.close()


class Here(Node):
    """The ranks of the leader's own node: each has its channel, and the board is theirs."""

    def __init__(self, stage: Stage, channels: list[channel.Channel]) -> None:
        super().__init__(stage, 0, lambda message: None, lambda op, text: None)
        self.channels = channels
        self.board: Board | None = None
        self.fill()

    def open(self) -> None:
        """Listen to the agent."""
        for rank, link in enumerate(self.channels):
            self.stage.selector.register(link.sock, selectors.EVENT_READ, lambda rank=rank: self.read(rank))

    def read(self, rank: int) -> None:
        link = self.channels[rank]
        if not self.ranks[rank].pid:
            _, fds = link.receive_with_fds()
            if self.board is None:
                self.board = Board(fds[0], self.stage.world_size)
            self.tick()
            self.ranks[rank].begin(next(Rank.pids))
            messages = link.read_kept()
        else:
            messages = link.read_available()
            while messages and select.select([link.sock], [], [], 0)[0]:
                messages += link.read_available()
        for message in messages:
            if isinstance(message, from_rank.Put):
                self.note_ports(message.generation, {int(message.key.split()[1])})
            else:
                self.ranks[rank].take(message)

    def say(self, rank: int, message: Message) -> None:
        if isinstance(message, from_rank.Put):
            self.note_ports(message.generation, {rank})
        self.channels[rank].send(message)

    def share(self, rank: int) -> None:
        self.tick()
        self.channels[rank].send(from_rank.RowChanged())

    def tick(self) -> None:
        for rank in self.ranks if self.board is not None else ():
            row = self.row(rank)
            for field, value in zip(SHARED, row.values, strict=True):
                self.board.set(rank, field, value)  # type: ignore[union-attr]


class Stage:
    """All stand-ins.

    nodes    by number
    counts   ("in" or "out" of the leader, op) -> messages, bytes
    """

    def __init__(self, world_size: int, per_node: int) -> None:
        self.world_size, self.per_node = world_size, per_node
        self.selector = selectors.DefaultSelector()
        self.nodes: dict[int, Node] = {}
        self.links: dict[Node, Link] = {}
        self.waiting: set[Link] = set()
        self._packed = b"", b""  # the newest
        self._ports: tuple[bytes, frozenset[int]] = (b"", frozenset())
        self._encoded: dict[str, str] = {}
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def unpacked(self, line: bytes) -> bytes:
        """A line to all nodes, read once for all of them: on their own machines each would do it by itself."""
        if line != self._packed[0]:
            self._packed = line, zlib.decompress(b64decode(json.loads(line)["line"])).rstrip(b"\n")
        return self._packed[1]

    def ports_in(self, line: bytes) -> frozenset[int]:
        """Whose ports the leader passes on, read once for all nodes."""
        if line is not self._ports[0]:
            self._ports = line, frozenset(map(int, PUTS.findall(line)))
        return self._ports[1]

    def encoded(self, message: Message) -> str:
        """A rank's message as it stands in a report; that of many ranks is often the same."""
        key = repr(message) if not isinstance(message, from_rank.RankFrozen) else f"frozen {message.generation}"
        if key not in self._encoded:
            self._encoded[key] = node_messages.encoded(message, self.world_size)
        return self._encoded[key]

    def note(self, way: str, op: str, size: int) -> None:
        """Count one message."""
        self.messages[f"{way} {op}"] += 1
        self.bytes[f"{way} {op}"] += size

    def connect(self, where: dict[str, Any], number: int) -> None:
        """A node comes; -1: it waits for slots."""
        link = Link(self, where, number)
        self.links[link.node] = link
        self.selector.register(link.sock, selectors.EVENT_READ, link.read)
        if number >= 0:
            self.nodes[number] = link.node
        link.flush()

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """What `scale_leader.py` wants; returns the answer."""
        match command:
            case {"connect": where, "nodes": numbers}:
                for number in numbers:
                    self.connect(where, number)
            case {"join": _}:
                for node in (*self.nodes.values(), self.here):
                    for rank in node.ranks.values():
                        rank.join()
            case {"kill": number}:
                self.nodes[number // self.per_node].kill(number)
            case {"lose": numbers}:
                for number in numbers:
                    self.links.pop(self.nodes.pop(number)).close()
            case {"count": _}:
                counts = {"messages": dict(self.messages), "bytes": dict(self.bytes)}
                self.messages.clear()
                self.bytes.clear()
                return counts
        return {}

    def run(self, here: Here) -> None:
        """Play until stdin ends."""
        self.here = here
        here.open()
        is_over = False

        def command() -> None:
            nonlocal is_over
            line = sys.stdin.buffer.readline()
            is_over = not line
            if line:
                print(json.dumps(self.obey(json.loads(line))), flush=True)

        self.selector.register(sys.stdin.buffer, selectors.EVENT_READ, command)
        next_s: dict[Node, float] = {}
        while not is_over:
            for key, _ in self.selector.select(0.02):
                if self.selector.get_map().get(key.fd) is key:
                    key.data()
            now = time.monotonic()
            every_s = agent.interval_s(self.world_size // self.per_node)
            for node in (*self.nodes.values(), here):
                if node.ranks and now >= next_s.setdefault(node, now):
                    next_s[node] = now + every_s
                    node.tick()
            for link in list(self.waiting):
                link.flush()


def main() -> None:
    """Arguments: ranks in all, ranks a node, descriptors of the channels of the leader's own ranks."""
    world_size, per_node, *fds = map(int, sys.argv[1:])
    stage = Stage(world_size, per_node)
    channels = [channel.Channel(socket.socket(fileno=fd)) for fd in fds]
    stage.run(Here(stage, channels))


if __name__ == "__main__":
    main()
