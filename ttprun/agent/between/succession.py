"""The agent that leads is lost: the next one leads, and the others connect to it.

Next is the lowest node whose agent is not known to be lost. It waits for what the others report of their ranks
(`meeting.Remains`), makes a job of that (`recovery.succeed`), and answers the loss of the old leader's node like
that of any other. Until then no orders are given: a replacement that has not caught up is ended, since its orders are
lost.

Two never lead. An agent that hangs up, and whose listener refuses a connection, has ended. One that did not answer any
more may have gone on without this node, and even have finished the job since, whatever its listener does. Of all others
who were there, launchers that wait among them, the next leader must reach more than half, and one that has lost nodes
at least half; else it ends its ranks. Begin with `Succession.begin`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace
from torch._C._distributed_c10d import TCPStore

from ttprun import recovery
from ttprun.agent.between.agent import Agent, Follower
from ttprun.agent.between.rendezvous import KNOWN
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.coordinator import Leader
from ttprun.agent.node.node import Process
from ttprun.agent.node.node_agent import NodeAgent
from ttprun.protocol import meeting, node_messages, process_orders
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.channel import Channel
from ttprun.protocol.meeting import Known, Legacy
from ttprun.protocol.patience import Patience
from ttprun.protocol.rank_events import RankExited, StopAsked

Done = Callable[[socket.socket | None, int], None]

logger = logging.getLogger("ttprun")

_GATHER_S = 10.0  # for the others to notice, too
_CONNECT_LIMIT_S = 5.0
_PROBE_LIMIT_S = 1.0
_PROBE_AGAIN_S = 0.3
_DYING_S = 3.0  # a process that ends closes one thing after the other; one that listens for longer has given us up


@dataclass
class _Heir:
    """What one follower has reported to the next leader.

    later   messages that came with its report, and are for the leader
    """

    link: Channel
    remains: meeting.Remains
    later: list[Any]


@dataclass
class Succession:
    """This agent's part in it.

    on_lead   called when this agent, which was a follower, has begun to lead
    """

    node: Agent
    orders: NodeAgent
    follower: Follower
    leader: Leader
    comparisons: Comparisons
    on_lead: Callable[[], None]
    _lost: dict[int, str] = field(default_factory=dict, init=False)
    _expected: set[int] = field(default_factory=set, init=False)
    _heirs: dict[int, _Heir] = field(default_factory=dict, init=False)
    _early: list[tuple[Channel, meeting.Hello]] = field(default_factory=list, init=False)
    _gathers: Patience | None = field(default=None, init=False)
    _ended: set[int] = field(default_factory=set, init=False)  # lost agents that have ended for sure
    _probe_again: dict[int, float] = field(default_factory=dict, init=False)
    _lost_s: dict[int, float] = field(default_factory=dict, init=False)  # when the first probe was made

    # A follower.

    def begin(self, number: int, why: str) -> None:
        """The leader is lost, or the agent that was to be the next one."""
        node, peers = self.node, self.node.peers
        if node.verdict is not None or not peers.is_follower or self._gathers is not None:
            return
        peers.hang_up(number, node.selector, f"{peers.name_of(peers.node)} did not hear it any more ({why})")
        self._lost[number] = why
        node.log("leader_lost", node=number, reason=why)
        logger.warning("%s, whose agent leads, is lost: %s", peers.name_of(number), why)
        if not peers.pools:
            reason = (
                f"the connection to {peers.name_of(number)}, which leads, is lost before it has said who leads next"
            )
            self.follower.give_up(f"{reason}: {why}", "restart")
            return
        for rank in self.orders.catching_up & self.orders.parked.keys():  # the replacement's orders are lost
            self.orders.carry_out(process_orders.TakeBack(rank, 0, "the agent that led was lost"))
        for slot in node.here:
            if slot.rank in self.orders.catching_up and not slot.is_lost:
                self._end_unfinished(slot)
        self._probe(number)
        self._follow_next()

    def _probe(self, number: int) -> None:
        """Whether the lost agent has ended for sure: then nobody listens at its listener, though its node answers."""
        peers = self.node.peers
        listener = peers.pools.get(number)
        if listener is None or number in self._ended or number in peers.cut_off:
            return
        self._lost_s.setdefault(number, time.monotonic())

        def done(sock: socket.socket | None, code: int) -> None:
            if sock is not None:
                sock.close()
            if code == errno.ECONNREFUSED:
                self._ended.add(number)
            elif time.monotonic() < self._lost_s[number] + _DYING_S:
                self._probe_again[number] = time.monotonic() + _PROBE_AGAIN_S

        self._dial(listener, _PROBE_LIMIT_S, done)

    def _dial(self, listener: meeting.Where, limit_s: float, done: Done) -> None:
        """Connect in the background; `done` is called with the socket and 0, or with None and an errno."""

        def failed(error: Exception) -> None:
            done(None, getattr(error, "errno", None) or errno.ETIMEDOUT)

        connect = partial(socket.create_connection, (listener.address, listener.port), limit_s)
        self.node.in_background(connect, lambda sock: done(sock, 0), failed)

    def _end_unfinished(self, slot: Process) -> None:
        """The process of a rank was being repaired: what it would be ordered to do next is lost."""
        why = "it had not caught up when the agent that led was lost"
        self.orders.note(slot.rank, code=-9, reason=why)
        self.orders.catching_up.discard(slot.rank)
        self.orders.carry_out(process_orders.KillRank(slot.rank, why))

    def _follow_next(self) -> None:
        peers = self.node.peers
        following = min(number for number in {*peers.pools, peers.node} if number not in self._lost)
        if following == peers.node:
            self._gather()
            return
        listener = peers.pools[following]

        def done(sock: socket.socket | None, code: int) -> None:
            if sock is not None:
                self._report_to(following, sock, listener.token)
                return
            if code == errno.ECONNREFUSED and not self._lost.keys() & peers.cut_off:
                self._ended.add(following)
            else:
                peers.cut_off.add(following)
            self.begin(following, f"it cannot be reached: {os.strerror(code)}")

        self._dial(listener, _CONNECT_LIMIT_S, done)

    def _report_to(self, following: int, sock: socket.socket, token: str) -> None:
        """Connected to the next leader: it hears how the ranks here stand."""
        node, peers = self.node, self.node.peers
        peers.follow(following, Channel(sock, KNOWN))
        peers.to_leader(meeting.Hello(token, peers.node, peers.names[peers.node], {}, remains=self._remains()))
        if node.ended_by:
            reason = f"ended by signal {node.ended_by}"
            peers.to_leader(StopAsked(at_s=time.monotonic(), reason=reason, signal=node.ended_by))
        node.log("leader_followed", node=following)

    def _remains(self) -> meeting.Remains:
        node = self.node
        ranks = [self._left(slot) for slot in node.here]
        every = [node.row_of(slot.rank) for slot in node.here]
        return meeting.Remains(node.generation, ranks, time.monotonic_ns(), every)

    def _left(self, slot: Process) -> Legacy:
        """How a rank of this node stands."""
        noted = self.orders.noted[slot.rank]
        is_lost = slot.is_lost or slot.rank in self.orders.unwelcomed
        return replace(
            noted,
            pid=slot.pid,
            is_present=slot.is_present,
            is_protected=slot.is_protected,
            is_finished=slot.is_finished,
            is_lost=is_lost,
            boundary=slot.lost_boundary if is_lost else 0,
            code=(noted.code or -9) if is_lost else 0,
        )

    # The next leader.

    def _gather(self) -> None:
        """This agent is the next one: wait for the others."""
        peers, pool = self.node.peers, self.node.peers.pool
        assert pool is not None
        self._expected = {number for number in peers.pools if number not in self._lost} - {peers.node}
        self._gathers = Patience(_GATHER_S)
        pool.listener.open(self.node.selector, self._came)
        self.look()

    def _came(self, link: Channel, hello: meeting.Hello) -> None:
        if hello.node not in self._expected:
            self._early.append((link, hello))  # it waits for slots
        elif hello.remains is None or node_messages.why_unfit(hello.remains, len(self.node.slots)):
            link.close()
            return
        else:
            self._heirs[hello.node] = _Heir(link, hello.remains, link.read_kept())
        self.look()

    def look(self) -> None:
        """Time has passed, or another one has reported."""
        for number in [node for node, at_s in self._probe_again.items() if time.monotonic() >= at_s]:
            del self._probe_again[number]
            if self._gathers is not None:
                self._probe(number)
        if self._gathers is None:
            return
        is_late = self._gathers.look()
        peers = self.node.peers
        reached = 1 + len(self._heirs) + len(self._early)  # agents that have come to this one, and itself
        agents = len(peers.pools) + peers.others - len(self._ended)  # that may still live
        may_lead = recovery.may_lead(reached, agents, has_led=False)
        if (self._expected <= self._heirs.keys() and may_lead) or is_late:
            self._gathers = None
            self._lead() if may_lead else self._give_up(reached, agents)

    def _give_up(self, reached: int, agents: int) -> None:
        """The others may go on without this node; of two halves, the one with the old leader does."""
        name = self.node.peers.name_of(self.node.peers.node)
        self.follower.give_up(f"{name} reaches {reached} of {agents} agents: the others may go on without it")
        for link in (*(heir.link for heir in self._heirs.values()), *(link for link, _ in self._early)):
            link.close()

    def _lead(self) -> None:
        """All that is left of the job is known."""
        node, peers = self.node, self.node.peers
        own, heirs = self._remains(), self._heirs
        legacies = {
            legacy.rank: legacy
            for remains in (own, *(heir.remains for heir in heirs.values()))
            for legacy in remains.ranks
        }
        for heir in heirs.values():
            node.copy_in(heir.remains.rows, heir.remains.now_ns)
        for slot in node.slots:
            slot.inherit(legacies.get(slot.rank), node.board.get(slot.rank, Field.RECORDED) == FINISHED)
        known = self.follower.known or Known()
        gone = [Legacy(slot.rank, is_finished=slot.is_finished) for slot in node.slots if slot.rank not in legacies]
        generation = max(own.generation, *(heir.remains.generation for heir in heirs.values()), 0)
        node.job = recovery.succeed(node.job.settings, (*legacies.values(), *gone), generation, known)
        self.comparisons.begin_resumed(node.job.replicas)
        node.served = store = TCPStore(peers.address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        master = f"{peers.address} {store.port}"
        peers.lead({number: heir.link for number, heir in heirs.items()})
        node.move_master(master)
        peers.to_all(meeting.Master(master))
        node.log("leads", node=peers.node, generation=generation, followers=sorted(heirs))
        logger.warning("%s leads from now on", peers.name_of(peers.node))
        self.leader.reports.checkpoints.why_never = known.why_no_checkpoints
        self.on_lead()
        assert peers.pool is not None
        early, self._early = self._early, []
        for link, hello in early:
            peers.pool.let_in(link, hello)
        for number, why in sorted(self._lost.items()):
            self.leader.lose(number, why)
        # Also those that the old leader had lost before, whose ranks it has not replaced.
        for number in sorted(set(range(peers.size)) - {peers.node} - heirs.keys() - self._lost.keys()):
            self.leader.lose(number, f"it has not reported to {peers.name_of(peers.node)}, which leads now")
        self.leader.decide_lost()  # before what other ranks suffer from it
        for legacy in legacies.values():
            if legacy.is_lost:
                ended = RankExited.ended(
                    legacy.code,
                    at_s=time.monotonic(),
                    rank=legacy.rank,
                    pid=legacy.pid,
                    boundary=legacy.boundary,
                    reason=legacy.reason,
                    crashed_at=legacy.crashed_at,
                )
                node.advance(ended)
        for number, heir in heirs.items():
            for message in heir.later:
                self.leader.take(number, message)
        self.leader.share()
