"""What the agents of all nodes report to the leader, and what becomes of it: mostly events of the state machine here.

A rank of another node has a slot here like any other; orders for it go to the follower of its node. What this node's
own ranks do is reported in the same way. Begin with `Leader.report`.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.base.ground import Failure
from ttprun.agent.lead.lead import Lead
from ttprun.agent.lead.membership import NodeMembership, Placement
from ttprun.agent.lead.reports import Reports
from ttprun.agent.lead.schedules import QuiesceSchedule
from ttprun.chaos.faults import parse_fault
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.board import Field
from ttprun.protocol.codec import Refused
from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.rank_events import Event, RankExited, RankStarted, SpawnFailed, StopAsked
from ttprun.recovery.replicas import UNKNOWN, Replicas

logger = logging.getLogger("ttprun")

_EVERY_S = 0.25
_ROWS_EVERY_S = 1.0  # what ranks of other nodes wait for is sent at once
_ROWS_OFTEN = 64  # nodes; those of more are sent less often, as each gets the rows of all
_ROWS_RARELY = 5.0


@dataclass
class Leader:
    """Takes the reports of all nodes."""

    node: Lead
    reports: Reports
    placement: Placement
    membership: NodeMembership
    quiesce_schedule: QuiesceSchedule
    _shared_pools: meeting.SparePools | None = field(default=None, init=False)
    _shared: tuple[object, ...] = field(default=(), init=False)
    _lost: dict[int, recovery.NodeLost] = field(default_factory=dict, init=False)  # by node: not decided on yet
    _shared_replicas: Replicas = field(default=UNKNOWN, init=False)
    _next_s: float = field(default=0.0, init=False)
    _rows_next_s: float = field(default=0.0, init=False)

    def share(self) -> None:
        """Let all followers know what one of them needs if it has to lead, if anything of it is new."""
        peers, job = self.node.peers, self.node.job
        waiting = 0 if peers.pool is None else len(peers.pool)
        there = {number: pool for number, pool in sorted(peers.pools.items()) if peers.is_connected(number)}
        pools = meeting.SparePools(there, waiting, dict(peers.listeners))
        why_never = self.reports.checkpoints.why_never
        now = (job.incident_count, job.restarts, job.unprotected_reason, why_never, job.saved)
        is_new = pools != self._shared_pools
        if is_new:
            self._shared_pools = pools
            peers.to_all(pools)
        if is_new or now != self._shared or job.replicas is not self._shared_replicas:
            self._shared, self._shared_replicas = now, job.replicas
            peers.to_all(recovery.known_of(job, why_never))
        if is_new and peers.pool is not None:
            peers.pool.announce(pools)

    def look(self) -> None:
        """Time has passed: each follower hears how the ranks of all other nodes stand, and that we live."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        self.share()
        self.placement.look()
        self.membership.look()
        node, peers = self.node, self.node.peers
        if now >= self._rows_next_s:
            self._rows_next_s = now + _ROWS_EVERY_S * min(_ROWS_RARELY, max(1.0, peers.size / _ROWS_OFTEN))
            peers.to_all(node.rows_of(range(len(node.slots))))
        for number in peers.silent(node.has_stepped()):
            peers.note_out_of_reach(number)
            self.lose(number, f"nothing was heard of it for {peers.unheard_s(number):.0f} s")
        self.decide_lost()

        reached, agents = peers.reach
        if 2 * reached < agents and node.verdict is None:
            name = peers.name_of(peers.node)
            self.depose(f"{name} reaches {reached} of {agents} agents: the others may go on without it")

    def welcome(self, address: str) -> None:
        """A node waits for slots. The others hear of it first: whoever is cut off then counts it among the living."""
        self.share()
        self.node.log("node_waits", address=address)
        self.placement.fill()

    def lose(self, number: int, why: str) -> None:
        """A node is gone with all of its ranks."""
        node, peers = self.node, self.node.peers
        if node.verdict is not None:
            return
        peers.hang_up(number, node.selector, why)
        self.placement.forget(number)
        self.membership.note_lost(number)
        first = number * peers.ranks_per_node
        slots = [slot for slot in node.slots[first : first + peers.ranks_per_node] if not slot.is_finished]
        for slot in slots:
            slot.lose(node.board)
        # The board knows its rows as of some time ago. What our own ranks have applied, all had recorded.
        applied = [node.board.get(slot.rank, Field.APPLIED) for slot in node.slots if slot.is_here]
        boundary = max(*applied, *(slot.lost_boundary for slot in slots)) if slots else 0
        node.log("node_lost", node=number, ranks=[slot.rank for slot in slots], boundary=boundary, reason=why)
        logger.warning("%s is lost: %s", peers.name_of(number), why)
        if not slots:
            return
        self.reports.comparisons.lose_mirrors([slot.rank for slot in slots])
        failure = Failure(slots[0].rank, 0, -signal.SIGTERM, f"{peers.name_of(number)} is lost: {why}")
        node.note_failure(failure)
        self._lost[number] = recovery.NodeLost(
            at_s=time.monotonic(),
            ranks=tuple(slot.rank for slot in slots),
            name=peers.name_of(number),
            boundary=boundary,
            detected_after_s=peers.unheard_s(number),
            reason=why,
        )

    def decide_lost(self) -> None:
        """Nodes that are lost at once are one fault, which all others answer once."""
        lost, self._lost = [self._lost[number] for number in sorted(self._lost)], {}
        if not lost or self.node.verdict is not None:
            return
        names = [loss.name for loss in lost]
        numbers = [self.node.peers.node_of(loss.rank) for loss in lost]
        self.node.advance(
            replace(
                max(lost, key=lambda loss: loss.at_s),
                ranks=tuple(rank for loss in lost for rank in loss.ranks),
                name=" and ".join(names if len(names) < 3 else (names[0], f"{len(names) - 1} others")),
                boundary=max(loss.boundary for loss in lost),
                detected_after_s=max(loss.detected_after_s for loss in lost),
            )
        )
        for number in numbers:
            self.placement.lose_copies(number)

    def depose(self, reason: str) -> None:
        """Another agent leads: this one's ranks end, and nothing is saved."""
        node = self.node
        node.is_deposed = True
        node.log("node_given_up", reason=reason)
        node.give_up(reason)

    def take(self, number: int, message: node_messages.OfFollower | Refused) -> None:
        """A follower has sent something."""
        node = self.node
        if node.verdict is not None:
            return
        why_unfit = node_messages.why_unfit(message, len(node.slots))
        if why_unfit:
            message = Refused(f"{type(message).__name__}: {why_unfit}")
        match message:
            case node_messages.Rows(now_ns=now_ns, rows=theirs):
                node.copy_in(theirs, now_ns)
                if message.is_awaited:
                    node.share(*(row.rank for row in theirs))
            case meeting.Deposed(reason=reason):
                self.depose(f"{node.peers.name_of(number)} goes on without this node: {reason}")
            case Refused(reason=reason):
                self._refuse(number, reason)
            case node_messages.Said(rows=rows, now_ns=now_ns):
                node.copy_in(rows, now_ns)
                self.report(number, message.decoded(len(node.slots)))
            case _ if isinstance(message, node_messages.Report):
                self.report(number, message)
            case _:
                self._refuse(number, f"{type(message).__name__} is no report")

    def report(self, number: int, report: node_messages.Report) -> None:
        """A node reports what has happened there; this one, too."""
        match report:
            case node_messages.Said():
                self._on_said(report)
            case Event():
                self._on_event(number, replace(report, at_s=time.monotonic()))
            case node_messages.Records():
                self.placement.take_records(report)
            case node_messages.Leaving(reason=reason):
                self.membership.leave(number, reason)
            case node_messages.PartStored():
                self.reports.checkpoints.take_part(report)
            case node_messages.FaultAsked(fault=fault):
                self._order(number, fault)

    def _order(self, number: int, fault: str) -> None:
        """Somebody on another node asks for a fault."""
        try:
            if not self.node.config.allow_faults:
                raise ValueError("the run was started without --allow-faults on the node whose agent leads")
            self.reports.injections.order(parse_fault(fault), f"inject-fault on {self.node.peers.name_of(number)}")
        except ValueError as error:
            self.node.log("fault_failed", number=None, fault=fault, reason=str(error))
            logger.warning("the fault %s, ordered on %s, is refused: %s", fault, self.node.peers.name_of(number), error)

    def _refuse(self, number: int, reason: str) -> None:
        self.node.log("message_refused", node=number, reason=reason)
        logger.warning("a message of %s is ignored: %s", self.node.peers.name_of(number), reason)

    def _on_said(self, said: node_messages.Said) -> None:
        slot, message = self.node.slots[said.rank], said.message
        if slot.pid != said.pid:
            return  # its process has ended
        if isinstance(message, RankFrozen):
            slot.fingerprints = {message.boundary: said.fingerprint}
        self.reports.take(slot, message)

    def _on_event(self, number: int, event: Event) -> None:
        """An event of the state machine, stamped with our time."""
        node = self.node
        where = {} if number == node.peers.node else {"node": number}
        match event:
            case RankStarted(rank=rank, pid=pid):
                if node.slots[rank].pid != pid or node.slots[rank].is_lost:  # else it is reported once more
                    node.slots[rank].begin_process(pid)
                if where:
                    node.log("rank_started", rank=rank, pid=pid, **where)
            case SpawnFailed(rank=rank, reason=reason):
                node.log("spawn_failed", rank=rank, reason=reason, **where)
            case RankExited():
                self._on_exited(event, where)
                return
            case StopAsked(signal=signal):
                node.ended_by = node.ended_by or signal
                stop = event
                self.quiesce_schedule.ask(lambda: node.advance(replace(stop, at_s=time.monotonic())), is_end=True)
                return
        node.advance(event)

    def _on_exited(self, event: RankExited, where: dict[str, int]) -> None:
        node, slot = self.node, self.node.slots[event.rank]
        if slot.pid != event.pid:
            return
        slot.end(event)
        if slot.is_lost:
            node.note_failure(event)
            event = replace(event, boundary=node.reached(slot.rank, event.boundary))
        event = replace(event, traceback="")
        node.log_exit(event, where)
        if slot.is_lost and slot.is_here:
            node.report_what_is_left(slot.rank)
        node.advance(event)
