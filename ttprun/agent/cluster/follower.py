"""A follower: the agent of a node that does not lead. It reports what happens to its ranks, and carries out orders.

Processes, standbys, records and logs are each node's own; what is decided comes from the leader. What another leader
would have to know it notes (`succession.py`). Begin with `Follower.take_order` and `Follower.forward`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ttprun.agent.cluster import board_rows
from ttprun.agent.core.failures import Failure
from ttprun.agent.core.local_actuator import LocalActuator
from ttprun.agent.core.node import Node
from ttprun.agent.core.outcomes import give_up
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.launcher.verdict import Verdict
from ttprun.agent.report.status import StatusPublisher
from ttprun.protocol import actions, channel, from_rank, meeting, node_orders, node_reports, to_rank
from ttprun.protocol.all_ranks import in_full, shortened
from ttprun.protocol.codec import Refused, decode, encode
from ttprun.protocol.events import Event, RankExited
from ttprun.recovery.members import GroupMembership

logger = logging.getLogger("ttprun")

_EVERY_S = 0.25
_OFTEN = 128  # nodes that report so often: the agent of more is at nothing else
_RARELY = 4.0


def interval_s(nodes: int) -> float:
    """Seconds from one report of how ranks stand to the next: each node of a large group reports less often."""
    return _EVERY_S * min(_RARELY, max(1.0, nodes / _OFTEN))


@dataclass
class RankNotes:
    """What the next leader would have to know of a rank of this node.

    hindrance, unprotected, membership   what its processes have reported of themselves last
    exit_code, cause               how its process has ended
    is_catching_up                 its process runs the script again, and is not as far as the others yet
    """

    hindrance: str = ""
    unprotected: str = ""
    membership: GroupMembership = GroupMembership.UNKNOWN
    exit_code: int = 0
    cause: str = ""
    is_catching_up: bool = False


@dataclass
class Follower:
    """Reports to the leader, and takes its orders.

    known   what the leader knows of the whole job
    noted   by rank
    """

    node: Node
    actuator: LocalActuator
    status: StatusPublisher
    known: node_orders.Known | None = field(default=None, init=False)
    noted: defaultdict[int, RankNotes] = field(default_factory=lambda: defaultdict(RankNotes), init=False)
    _next_s: float = field(default=0.0, init=False)

    def begin_group(self) -> None:
        """All ranks are new."""
        self.noted.clear()

    def look(self) -> bool:
        """Time has passed: report how the ranks stand; returns whether it was time for that."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + interval_s(self.node.peers.size)
        self.node.peers.to_leader(board_rows.rows_of(self.node, self.node.here))
        return True

    # Reports.

    def report(self, event: Event) -> None:
        """What has happened to a rank, which the leader's state machine answers."""
        peers, node = self.node.peers, self.node
        match event:
            case from_rank.RankUnprotected():
                self.forward(node.slots[event.rank], event)
            case RankExited():
                slot, noted = node.slots[event.rank], self.noted[event.rank]
                noted.exit_code, noted.cause = event.exit_code, event.reason
                peers.to_leader(board_rows.rows_of(node, [slot], is_awaited=True))
                peers.to_leader(replace(event, traceback=slot.traceback))
            case _ if isinstance(event, node_reports.OfNode):
                peers.to_leader(event)
            case _:
                node.log("not_reported", what=type(event).__name__)

    def forward(self, slot: RankSlot, message: Any) -> None:
        """Forward what a rank reports, with its row of the board; what this agent needs of it is noted."""
        node, noted = self.node, self.noted[slot.rank]
        hashed: dict[int, str] = {}
        match message:
            case from_rank.RowChanged():
                board_rows.share(node, [slot])
                return
            case from_rank.Present():
                slot.greet(message.main_thread)
            case from_rank.RankProtected():
                slot.protect()
            case from_rank.RankUnprotected(reason=reason):
                noted.unprotected = noted.unprotected or reason
            case from_rank.RankHindered(reason=reason):
                noted.hindrance = reason
            case from_rank.RankTrainsAlone():
                noted.membership = GroupMembership.ALONE
            case from_rank.RankJoined():
                noted.membership = GroupMembership.JOINED
            case from_rank.RankReissued():
                noted.is_catching_up = False
            case from_rank.RankFaulted():
                noted.is_catching_up = True
                slot.note_boundary(node.board)
            case from_rank.RankFrozen(boundary=boundary):
                hashed = {boundary: self.actuator.fingerprint(slot.rank, boundary)}
        line = encode(shortened(message, len(node.slots))).decode().rstrip("\n")
        said = node_reports.Said(slot.rank, slot.pid, line, time.monotonic_ns(), board_rows.row_of(node, slot), hashed)
        node.peers.to_leader(said)

    # Orders.

    def take_order(self, order: node_orders.OfLeader | Refused) -> None:
        """The leader has sent something."""
        node = self.node
        why_unfit = node_reports.why_unfit(order, len(node.slots))
        if why_unfit:
            order = Refused(f"{type(order).__name__}: {why_unfit}")
        match order:
            case node_reports.Rows(now_ns=now_ns, rows=theirs):
                board_rows.copy_in(node, theirs, now_ns)
            case node_orders.Begin(generation=generation):
                node.note_generation(generation)
                self.actuator.carry_out(order)
            case actions.SpawnRank(rank=rank, generation=generation):
                node.note_generation(generation)
                self.noted[rank].is_catching_up = True
                self.actuator.carry_out(order)
            case actions.Rewind(generation=generation):
                node.note_generation(generation)
                if self.actuator.rewinds.open(order):
                    self.actuator.carry_out(order)
            case node_orders.Forward():
                self._forward(order)
            case node_orders.Published():
                self.status.take(order)
            case meeting.SparePools():
                node.peers.note_pools(order)
            case node_orders.Known():
                self.known = order
            case meeting.Master(where=where):
                node.move_master(where)
            case meeting.Deposed(reason=reason):
                self.give_up(f"{node.peers.leaders_name} goes on without this node: {reason}")
            case meeting.Concluded():
                self._conclude(order)
            case meeting.Regroup():
                node.log("regroup", nodes=order.size, node=order.node, reason=order.reason)
                node.conclude(Verdict("resize", order.reason, regroup=order))
            case Refused(reason=reason):
                node.log("message_refused", reason=reason)
                logger.warning("a message of the agent that leads is ignored: %s", reason)
            case _:
                if isinstance(order, node_orders.Order):
                    self.actuator.carry_out(order)
                else:
                    node.log("message_refused", reason=f"{type(order).__name__} is no order")

    def _forward(self, order: node_orders.Forward) -> None:
        node = self.node
        slots = [node.slots[rank] for rank, pid in order.to if node.slots[rank].pid == pid]
        present = [slot.rank for slot in slots if slot.is_present]
        if not present:
            return  # it is of processes that have ended
        message = in_full(decode(order.line.encode(errors="surrogatepass"), channel.KNOWN), len(node.slots))
        if isinstance(message, to_rank.Freeze):
            node.note_generation(message.generation)
        if isinstance(message, Refused):
            node.log("message_refused", reason=message.reason)
            return
        for rank in present:
            self.actuator.forward(rank, message)

    def give_up(self, reason: str, kind: str = "fail") -> None:
        """This node has no part in the job any more: its ranks end.

        kind   of the verdict
        """
        node = self.node
        if node.verdict is not None:
            return
        node.log("node_given_up", reason=reason)
        give_up(node, reason, kind)

    def _conclude(self, order: meeting.Concluded) -> None:
        node = self.node
        if node.verdict is not None:
            return
        found = node.first_failure.found
        if order.kind != "done" and (found is None or found.exit_code != order.exit_code):  # the launchers end alike
            node.first_failure.note(Failure(node.here[0].rank, 0, order.exit_code, order.reason), is_new_incident=True)
        if order.kind == "restart":
            logger.warning("all ranks start again: %s", order.reason)
        node.log("group_given_up", kind=order.kind, reason=order.reason)
        node.end_by(order.ended_by)
        node.hear_conclusion(Verdict(order.kind, order.reason, order.has_progress))
