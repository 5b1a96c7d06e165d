"""The coordinator: owns the state machine of the whole job. Events go in, and what it orders is carried out.

What concerns one node's ranks goes to that node's actuator (`actuators.py`). Begin with `Coordinator.advance`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.checkpoints.checkpoints import Checkpoints
from ttprun.agent.cluster.actuators import Actuators
from ttprun.agent.cluster.leader import Leader
from ttprun.agent.cluster.membership import NodeMembership
from ttprun.agent.cluster.spares import Spares
from ttprun.agent.core.deadlines import Deadlines
from ttprun.agent.core.domains import CannotDecideError
from ttprun.agent.core.incidents import Incidents
from ttprun.agent.core.node import Node
from ttprun.agent.launcher.verdict import Verdict
from ttprun.agent.repair.repairs import Repairs
from ttprun.agent.repair.rewinds import Rewinds
from ttprun.protocol import node_orders, process_orders, to_rank
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reasons import pointer

logger = logging.getLogger("ttprun")


@dataclass
class Coordinator:
    """Decides for all ranks, on whatever nodes they are."""

    node: Node
    actuators: Actuators
    checkpoints: Checkpoints
    incidents: Incidents
    repairs: Repairs
    rewinds: Rewinds
    membership: NodeMembership
    spares: Spares
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
        actions = self.node.decide(event)
        job = self.node.job
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
        match action:
            case to_rank.Freeze():
                self.freeze(action)
            case process_orders.SpawnRank():
                self.spares.spawn(action)
            case to_rank.Replay():
                self.repairs.replay(action)
            case to_rank.SendState():
                self.repairs.send_state(action)
            case to_rank.LoadMirror():
                self.repairs.load_mirror(action)
            case to_rank.LoadState():
                self.rewinds.load_state(action)
            case to_rank.Resume():
                self.repairs.resume(action)
            case process_orders.Rewind():
                self.rewinds.rewind(action)
            case recovery.Persist(ranks=()):
                self.rewinds.save(action)
            case recovery.Persist():
                self.repairs.persist(action)
            case recovery.GiveUpCheckpoint(boundary=boundary, reason=reason):
                self.checkpoints.give_up(boundary, reason)
            case recovery.NoteUnusable():
                self.rewinds.note_unusable(action)
            case recovery.SetDeadline():
                self.deadlines.set(action)
            case process_orders.KillRank():
                self.actuators.order(action.rank, action)
            case recovery.RecordIncident(incident=incident):
                self.record_incident(incident)
            case recovery.RestartGroup(reason=reason):
                self._end_group("restart", reason)
            case recovery.Regroup():
                self.membership.regroup(action)
            case recovery.GiveUpResize():
                self.membership.give_up(action)
            case recovery.FailJob(reason=reason, has_progress=has_progress):
                self._end_group("fail", reason, has_progress)
            case recovery.FinishJob():
                self.node.conclude(Verdict("done"))
            case _:
                raise TypeError(f"there is no way to carry out {action}")

    def freeze(self, action: to_rank.Freeze) -> None:
        """Have the survivors quiesce."""
        self.repairs.expect(action.lost)
        board = self.node.board
        committed = min(board.get(slot.rank, Field.RECORDED) for slot in self.node.slots)
        committed = 0 if committed == FINISHED else committed
        order = replace(action, repair_type=self.repairs.repair_type(), committed=committed)
        for rank in action.ranks:
            self.node.slots[rank].send(order)

    def _end_group(self, kind: str, reason: str, has_progress: bool = True) -> None:
        before = self.node.verdict
        if before is not None and (before.kind, kind) != ("restart", "fail"):
            return  # what led here comes first, and explains the rest; but a job that has been ended is not restarted
        if kind == "restart":  # why a job ends is said at its very end, by the launcher
            logger.warning("all ranks start again: %s%s", reason, pointer(reason))
        self.node.log("group_given_up", kind=kind, reason=reason)
        self.node.conclude(Verdict(kind, reason, has_progress))

    def record_incident(self, incident: recovery.Incident) -> None:
        """Let all who follow it know how an incident stands."""
        self.node.domains.run("incident notes", lambda: self.incidents.note(incident))
        self.repairs.note_incident(incident)
        if incident.outcome == "recovered":
            for slot in self.node.slots:
                slot.take_journal({})
                slot.forget_divergence()
            self.actuators.order_all(node_orders.Recovered())
