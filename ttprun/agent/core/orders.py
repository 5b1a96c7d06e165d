"""What the machine orders, carried out: begin with `Orders.carry_out`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ttprun import recovery
from ttprun.agent.checkpoints.checkpoints import Checkpoints
from ttprun.agent.cluster.membership import NodeMembership
from ttprun.agent.cluster.spares import Spares
from ttprun.agent.core.incidents import Incidents
from ttprun.agent.core.node import Node
from ttprun.agent.health.hang_detector import HangDetector
from ttprun.agent.launcher.verdict import Verdict
from ttprun.agent.processes import life_locks, stacks
from ttprun.agent.processes.process_watch import Watch
from ttprun.agent.processes.rank_processes import RankHandler, StandbyHandler, kill_session
from ttprun.agent.processes.set_ups import SetUps
from ttprun.agent.processes.standby_watch import StandbyWatch
from ttprun.agent.processes.standbys import Standbys
from ttprun.agent.repair.repairs import Repairs
from ttprun.agent.repair.rewinds import Rewinds
from ttprun.protocol import nodes, to_rank
from ttprun.protocol.board import FINISHED, Field

logger = logging.getLogger("ttprun")


@dataclass
class Orders:
    """Carries out actions on a node's ranks.

    set_deadline     has the machine informed when so many seconds have passed
    replace_handler  lets torch's agent know of the new process of a local rank; set once a group has begun
    """

    node: Node
    checkpoints: Checkpoints
    incidents: Incidents
    hang_detector: HangDetector
    repairs: Repairs
    rewinds: Rewinds
    membership: NodeMembership
    spares: Spares
    set_ups: SetUps
    standbys: Standbys
    standby_watch: StandbyWatch
    watch: Watch
    set_deadline: Callable[[recovery.SetDeadline], None]
    replace_handler: Callable[[int, RankHandler], None] = field(init=False)

    def carry_out(self, action: recovery.Action) -> None:
        """Carry out one action."""
        match action:
            case recovery.Freeze():
                self.freeze(action)
            case recovery.SpawnRank():
                self.spawn_rank(action)
            case recovery.Replay():
                self.repairs.replay(action)
            case recovery.SendState():
                self.repairs.send_state(action)
            case recovery.LoadMirror():
                self.repairs.load_mirror(action)
            case recovery.LoadState():
                self.rewinds.load_state(action)
            case recovery.Resume():
                self.repairs.resume(action)
            case recovery.Rewind():
                self.rewinds.rewind(action)
            case recovery.Persist():
                self.repairs.persist(action)
            case recovery.GiveUpCheckpoint(boundary=boundary, reason=reason):
                self.checkpoints.give_up(boundary, reason)
            case recovery.NoteUnusable():
                self.rewinds.note_unusable(action)
            case recovery.SetDeadline():
                self.set_deadline(action)
            case recovery.KillRank():
                self.kill_rank(action)
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

    def freeze(self, action: recovery.Freeze) -> None:
        """Have the survivors quiesce."""
        self.repairs.expect(action.lost)
        repair_type = self.repairs.repair_type()
        board = self.node.board
        committed = min(board.get(slot.rank, Field.RECORDED) for slot in self.node.slots)
        order = to_rank.Freeze(
            action.generation,
            list(action.ranks),
            list(action.lost),
            repair_type,
            committed=0 if committed == FINISHED else committed,
        )
        for rank in action.ranks:
            self.node.slots[rank].send(order)

    def spawn_rank(self, action: recovery.SpawnRank) -> None:
        """Give a lost rank a process: a standby, or a new one, once the old one has given back what it had.

        A standby that is on its way is waited for: a new process would take as long, and then there would be none left
        for the next fault.
        """
        slot = self.node.slots[action.rank]
        if not slot.is_here:
            self.spares.spawn(action)
            return
        is_on_its_way = self.standbys.is_on_its_way
        if is_on_its_way:
            self.standbys.hurry()
        if slot.is_dying or is_on_its_way:
            slot.spawn = lambda: self.spawn_rank(action)
            return
        slot.spawn = None
        try:
            handler = self.set_ups.take(slot) or self.start_process(slot.handler.start)
        except OSError as error:
            self.node.log("spawn_failed", rank=slot.rank, reason=str(error))
            event = recovery.SpawnFailed(at_s=time.monotonic(), rank=slot.rank, reason=str(error))
            self.node.advance(event)
            return
        self.replace_handler(slot.local_rank, handler)
        slot.sit(handler)
        self.watch.welcome(slot, is_replacement=True)

    def start_process(self, start: dict[str, Any]) -> RankHandler:
        """Start a process, or take one that stands by. Raises OSError."""
        standby = self.standbys.take()
        if standby is None:
            return RankHandler(start, str(self.node.run.path), is_new=False, is_python=True)
        with contextlib.suppress(KeyError, ValueError):
            self.node.selector.unregister(standby.channel.sock)
        standby.channel.sock.setblocking(True)
        return StandbyHandler(start, standby)

    def kill_rank(self, action: recovery.KillRank) -> None:
        """End a process whose rank is given to another one; that waits until it is gone, if it goes before long.

        What it has left on the board must not change any more: it is stopped at once, and killed when its stack is
        known, which may take seconds.
        """
        slot = self.node.slots[action.rank]
        if not slot.is_here:
            self.node.log("rank_killed", rank=action.rank, pid=slot.pid, reason=action.reason, stack="")
            order = nodes.Kill(action.rank, action.reason, slot.keeps_evidence)
            self.node.peers.to_node_of(action.rank, order)
            slot.is_lost, slot.pid = True, 0  # what it still sends is not heard
            slot.note_leavings(self.node.board)
            return
        handler = slot.handler
        is_looked_at = self.hang_detector.is_late(slot)
        if is_looked_at:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGSTOP)
        else:
            slot.kill()
        life_locks.let_stop(slot.pid)
        self.watch.let_die(slot)
        slot.note_leavings(self.node.board)

        def kill(stack: str) -> None:
            self.node.log("rank_killed", rank=action.rank, pid=handler.proc.pid, reason=action.reason, stack=stack)
            if not is_looked_at or handler.proc.poll() is not None:
                return
            kill_session(handler.proc.pid)
            if self.node.board.get(slot.rank, Field.RECORDED) > slot.lost_boundary and slot.handler is handler:
                # What it has done while it wrote its stack is void.
                self.node.board.set(slot.rank, Field.RECORDED, slot.lost_boundary)

        if is_looked_at:
            self.node.aside(partial(stacks.take, slot.pid, slot.stack_fd, is_stopped=True), kill)
        else:
            kill("")

    def _end_group(self, kind: str, reason: str, has_progress: bool = True) -> None:
        before = self.node.verdict
        if before is not None and (before.kind, kind) != ("restart", "fail"):
            return  # what led here comes first, and explains the rest; but a job that has been ended is not restarted
        if kind == "restart":  # why a job ends is said at its very end, by the launcher
            logger.warning("all ranks start again: %s", reason)
        self.node.log("group_given_up", kind=kind, reason=reason)
        self.node.conclude(Verdict(kind, reason, has_progress))

    def record_incident(self, incident: recovery.Incident) -> None:
        """Let all who follow it know how an incident stands."""
        self.incidents.note(incident)
        self.repairs.note_incident(incident)
        if incident.outcome == "recovered":
            self.node.first_failure.forget()
            for slot in self.node.slots:
                slot.journal = {}
                slot.divergence = ""
            self.standby_watch.refill()
            if self.node.peers.is_leading:
                self.node.peers.to_hands(nodes.Recovered())
