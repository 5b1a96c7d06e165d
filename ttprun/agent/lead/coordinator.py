"""Takes what all nodes report (`Leader.report`), asks the state machine, and carries out its actions (`ACTIONS`).

A rank of another node has a row here like any other; orders for it go to the follower of its node. What this node's own
ranks do is reported in the same way.

The coordinator owns the state machine of the whole job. What concerns one node's ranks goes to that node (`rows.py`).
The deadlines of a recovery's phases are for ranks that do nothing more: while all that are waited for still work, a
deadline comes up to ten times as late, and later on a busy machine. Only a job that a user or scheduler ends has no
more time than was asked for. Begin with `ACTIONS`, `Coordinator.advance` and `Deadlines.pass_time`.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.base.ground import Failure, Verdict
from ttprun.agent.base.loop import CannotDecideError
from ttprun.agent.lead.checkpoints import Checkpoints
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.incidents import Incidents
from ttprun.agent.lead.membership import NodeMembership, Placement
from ttprun.agent.lead.repairs import Repairs, Rewinds
from ttprun.agent.lead.reports import Reports
from ttprun.agent.lead.rows import Lead, Row, Wire
from ttprun.agent.lead.schedules import QuiesceSchedule
from ttprun.protocol import meeting, node_messages, process_orders, to_rank
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.codec import Refused
from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.patience import Patience
from ttprun.protocol.rank_events import Event, RankExited, RankStarted, SpawnFailed, StopAsked
from ttprun.recovery.replicas import Replicas

logger = logging.getLogger("ttprun")

_EVERY_S = 0.25
_ROWS_EVERY_S = 1.0  # what ranks of other nodes wait for is sent at once
_ROWS_OFTEN = 64  # nodes; those of more are sent less often, as each gets the rows of all
_ROWS_RARELY = 5.0
SAY_AFTER_S = 15.0


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
    _noticed: dict[int, str] = field(default_factory=dict, init=False)  # by node: it leaves, and may be drained first
    _shared_replicas: Replicas = field(default_factory=Replicas, init=False)
    _next_s: float = field(default=0.0, init=False)
    _rows_next_s: float = field(default=0.0, init=False)

    def share(self) -> None:
        """Let all followers know what one of them needs if it has to lead, if anything of it is new."""
        peers, job = self.node.peers, self.node.job
        there = {number: pool for number, pool in sorted(peers.pools.items()) if peers.is_connected(number)}
        pools = meeting.SparePools(there, peers.reach[1] - len(there), dict(peers.listeners))
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
        if self._noticed and self.node.job.phase is recovery.JobPhase.RUNNING:
            self._heed(*next(iter(self._noticed.items())))
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
        if node.verdict is None and not recovery.may_lead(reached, agents, has_led=True):
            name = peers.name_of(peers.node)
            self.depose(f"{name} reaches {reached} of {agents} agents: the others may go on without it")

    def welcome(self, address: str) -> None:
        """A node waits for slots. The others hear of it first: whoever is cut off then counts it among the living."""
        self.share()
        self.node.log("node_waits", address=address)
        self.placement.fill()

    def _heed(self, number: int, notice: str) -> None:
        """A node is to leave: another one takes its place if one may; else it leaves as nodes do."""
        if why_not := self.placement.drain(number, notice):
            del self._noticed[number]
            self.node.log("not_drained", node=number, reason=why_not)
            self.membership.leave(number, notice)

    def let_go(self, action: recovery.LetNodeGo) -> None:
        """A node leaves as planned: its ranks are lost, which is known."""
        number = self.node.peers.node_of(action.ranks[0])
        self.part_from(number, action.reason, "leaves")
        self.placement.lose_copies(number)

    def lose(self, number: int, why: str) -> None:
        """A node is gone with all of its ranks."""
        node, peers = self.node, self.node.peers
        if node.verdict is not None:
            return
        unheard_s, name = peers.unheard_s(number), peers.name_of(number)
        slots, boundary = self.part_from(number, why, "is lost")
        if not slots:
            return
        node.note_failure(Failure(slots[0].rank, 0, -signal.SIGTERM, f"{name} is lost: {why}"))
        self._lost[number] = recovery.NodeLost(
            at_s=time.monotonic(),
            ranks=tuple(slot.rank for slot in slots),
            name=name,
            boundary=boundary,
            detected_after_s=unheard_s,
            reason=why,
        )

    def part_from(self, number: int, why: str, how: str) -> tuple[list[Row], int]:
        """Hang up on a node; returns the rows of its ranks that had not finished, and how far they had come.

        why, how   for people: "node 1 `how`: `why`"
        """
        node, peers = self.node, self.node.peers
        peers.hang_up(number, node.selector, why)
        self._noticed.pop(number, None)
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
        logger.warning("%s %s: %s", peers.name_of(number), how, why)
        if slots:
            self.reports.comparisons.lose_mirrors([slot.rank for slot in slots])
        return slots, boundary

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
                if "notice" in self.node.config.move_on:
                    self._noticed[number] = reason
                else:
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
            self.reports.injections.order(fault, f"inject-fault on {self.node.peers.name_of(number)}")
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
                if node.job.members[rank].pid not in (None, pid):
                    return  # the replacement of a process that has its place again
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


@dataclass
class _Wait:
    """One deadline: its order, when it was given, and how much of it is left."""

    order: recovery.SetDeadline
    patience: Patience
    since_s: float
    is_said: bool = False


class Deadlines:
    """Those that the machine has asked for."""

    def __init__(self, node: Lead, hang_detector: HangDetector) -> None:
        self._node = node
        self._hang_detector = hang_detector
        self._waits: list[_Wait] = []

    def set(self, order: recovery.SetDeadline) -> None:
        """Post DeadlinePassed when the time is over."""
        ending = self._node.job.ending
        is_urgent = ending is not None and not ending.is_fault
        patience = Patience(order.after_s, is_scaled=not is_urgent)
        self._waits.append(_Wait(order, patience, time.monotonic()))

    def pass_time(self) -> None:
        """Post those that are over, and tell the console of those that take long."""
        job = self._node.job
        self._waits = [wait for wait in self._waits if wait.order.rank is not None or self._is_current(wait.order)]
        if not self._waits:
            return
        times = math.inf if self._hang_detector.do_all_work(recovery.who_is_awaited(job)) else 1.0
        over = [wait for wait in self._waits if wait.patience.look(times)]
        for wait in over:
            self._waits.remove(wait)
        self._say()
        for order in (wait.order for wait in over):
            is_current = order.rank is None and self._is_current(order)
            silent = self._hang_detector.silent_ranks() if is_current else ()
            passed = recovery.DeadlinePassed(
                at_s=time.monotonic(), generation=order.generation, name=order.name, silent=silent, rank=order.rank
            )
            self._node.advance(passed)

    def _is_current(self, order: recovery.SetDeadline) -> bool:
        return order.generation == self._node.job.generation

    def _say(self) -> None:
        """Say once of each wait that takes long for whom it is; of a phase that is over the deadline says nothing."""
        job = self._node.job
        for wait in self._waits:
            is_of_phase = wait.order.rank is None and wait.since_s >= job.phase_since_s
            if wait.is_said or not is_of_phase or time.monotonic() - wait.since_s < SAY_AFTER_S:
                continue
            wait.is_said = True
            missing = recovery.missing_from(job)
            if missing:
                logger.warning("still waiting for %s (limit: %.0f s without progress)", missing, wait.order.after_s)


# Action -> the method that carries it out, of the coordinator or of one of its parts.
ACTIONS: dict[type[Struct], str] = {
    to_rank.Freeze: "_freeze",
    process_orders.SpawnRank: "placement.start",
    process_orders.KillRank: "_kill",
    process_orders.ParkRank: "_pass_on",
    process_orders.TakeBack: "_pass_on",
    process_orders.Rewind: "rewinds.rewind",
    to_rank.Replay: "repairs.replay",
    to_rank.SendState: "repairs.send_state",
    to_rank.LoadMirror: "repairs.load_mirror",
    to_rank.LoadState: "rewinds.load_state",
    to_rank.Resume: "repairs.resume",
    recovery.Persist: "_persist",
    recovery.GiveUpCheckpoint: "checkpoints.give_up",
    recovery.NoteUnusable: "rewinds.note_unusable",
    recovery.SetDeadline: "deadlines.set",
    recovery.RecordIncident: "_record",
    recovery.Regroup: "membership.regroup",
    recovery.GiveUpResize: "membership.give_up",
    recovery.LetNodeGo: "leader.let_go",
    recovery.RestartGroup: "_end_group",
    recovery.FailJob: "_end_group",
    recovery.FinishJob: "_finish",
}


@dataclass
class Coordinator:
    """Decides for all ranks, on whatever nodes they are."""

    node: Lead
    wire: Wire
    checkpoints: Checkpoints
    incidents: Incidents
    repairs: Repairs
    rewinds: Rewinds
    membership: NodeMembership
    placement: Placement
    hang_detector: HangDetector
    deadlines: Deadlines
    leader: Leader
    _undecided: deque[Event] = field(default_factory=deque, init=False)
    _is_deciding: bool = field(default=False, init=False)

    def advance(self, event: Event) -> None:
        """Let the machine decide; what its actions bring about is decided after they are all carried out."""
        self._undecided.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        try:
            while self._undecided and not self.node.is_paused:
                self._decide(self._undecided.popleft())
        except Exception as error:
            raise CannotDecideError(f"{type(error).__name__}: {error}") from error
        finally:
            self._is_deciding = False
            if self.node.is_paused:  # else what comes after a failure is decided with the next event
                self._undecided.clear()

    def _decide(self, event: Event) -> None:
        before = self.node.job
        job, actions = recovery.advance(before, event)
        self.node.job = job
        if job.phase is not before.phase:
            incident = job.incident or before.incident
            self.node.log(
                "phase_changed",
                generation=job.generation,
                incident=None if incident is None else incident.id,
                before=str(before.phase),
                after=str(job.phase),
                cause=type(event).__name__,
            )
            self.leader.share()
        for action in actions:
            self.carry_out(action)
            self.node.peers.flush()  # other nodes are at it while this one carries out the next one

    def carry_out(self, action: Struct) -> None:
        """Carry out one action."""
        attrgetter(ACTIONS[type(action)])(self)(action)

    def _freeze(self, action: to_rank.Freeze) -> None:
        """Have the survivors quiesce."""
        self.repairs.expect(action.lost)
        board = self.node.board
        committed = min(board.get(slot.rank, Field.RECORDED) for slot in self.node.slots)
        committed = 0 if committed == FINISHED else committed
        order = replace(action, repair_type=self.repairs.repair_type(), committed=committed)
        for rank in action.ranks:
            self.node.slots[rank].send(order)

    def _persist(self, action: recovery.Persist) -> None:
        if action.ranks:
            self.repairs.persist(action)
        else:
            self.rewinds.save(action)

    def _kill(self, action: process_orders.KillRank) -> None:
        self.wire.order(action.rank, replace(action, is_late=self.hang_detector.is_late(self.node.slots[action.rank])))

    def _pass_on(self, action: process_orders.ParkRank | process_orders.TakeBack) -> None:
        self.wire.order(action.rank, action)

    def _finish(self, action: recovery.FinishJob) -> None:
        self.node.conclude(Verdict("done"))

    def _end_group(self, action: recovery.RestartGroup | recovery.FailJob) -> None:
        kind, reason, before = "restart", action.reason, self.node.verdict
        has_progress = True
        if isinstance(action, recovery.FailJob):
            kind, has_progress = "fail", action.has_progress
        if before is not None and (before.kind, kind) != ("restart", "fail"):
            return  # what led here comes first, and explains the rest; but a job that has been ended is not restarted
        if kind == "restart":  # why a job ends is said at its very end, by the launcher
            logger.warning("all ranks start again: %s%s", reason, reason.pointer)
        self.node.log("group_given_up", kind=kind, reason=reason)
        self.node.conclude(
            Verdict(kind, reason.text, has_progress, reason_kind=reason.kind, first=reason.first or reason.text)
        )

    def _record(self, action: recovery.RecordIncident) -> None:
        """Let all who follow it know how an incident stands."""
        incident = action.incident
        self.node.domains.run("incident notes", lambda: self.incidents.note(incident))
        self.repairs.note_incident(incident)
        if incident.outcome == "recovered":
            for slot in self.node.slots:
                slot.journal, slot.divergence = {}, ""
            self.wire.order_all(node_messages.Recovered())
