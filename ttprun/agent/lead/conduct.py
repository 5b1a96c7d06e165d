"""The coordinator: owns the state machine of the whole job. Events go in, and what it orders is carried out.

What concerns one node's ranks goes to that node (`lead.py`). The deadlines of a recovery's phases are
for ranks that do nothing more: while all that are waited for still work, a deadline comes up to ten times as late, and
later on a busy machine. Only a job that a user or scheduler ends has no more time than was asked for. Begin with
`ACTIONS`, `Coordinator.advance` and `Deadlines.pass_time`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.base.ground import Verdict
from ttprun.agent.base.loop import CannotDecideError
from ttprun.agent.lead.checkpoints import Checkpoints
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.incidents import Incidents
from ttprun.agent.lead.lead import Lead, Wire
from ttprun.agent.lead.leader import Leader
from ttprun.agent.lead.membership import NodeMembership, Placement
from ttprun.agent.lead.repairs import Repairs, Rewinds
from ttprun.protocol import node_messages, process_orders, to_rank
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.patience import MOST_TIMES, Patience
from ttprun.protocol.rank_events import Event

logger = logging.getLogger("ttprun")
SAY_AFTER_S = 15.0


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
        times = MOST_TIMES if self._hang_detector.do_all_work(recovery.who_is_awaited(job)) else 1.0
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
ACTIONS: dict[type[process_orders.Action], str] = {
    to_rank.Freeze: "_freeze",
    process_orders.SpawnRank: "placement.start",
    process_orders.KillRank: "_kill",
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

    def carry_out(self, action: process_orders.Action) -> None:
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
        is_late = self.hang_detector.is_late(self.node.slots[action.rank])
        self.wire.order(action.rank, replace(action, is_late=is_late))

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
