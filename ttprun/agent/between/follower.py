"""A follower: the agent of a node that does not lead. It reports what happens to its ranks, and carries out orders.

Processes, standbys, records and logs are each node's own; what is decided comes from the leader. How the ranks stand is
sent as rows of the board, and written to the board of the other node; times in a row are on the clock of the machine
that sends it, and are moved to ours. Begin with `Follower.take_order` and `Follower.report`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ttprun.agent.base.verdict import Failure, Verdict
from ttprun.agent.between.agent import Agent
from ttprun.agent.node.node_agent import NodeAgent
from ttprun.protocol import from_rank, meeting, node_messages
from ttprun.protocol.codec import Refused
from ttprun.protocol.meeting import Known
from ttprun.protocol.rank_events import RankExited, SpawnFailed

logger = logging.getLogger("ttprun")

_EVERY_S = 0.25
_OFTEN = 128  # nodes that report so often: the agent of more is at nothing else
_RARELY = 4.0


def interval_s(nodes: int) -> float:
    """Seconds from one report of how ranks stand to the next: each node of a large group reports less often."""
    return _EVERY_S * min(_RARELY, max(1.0, nodes / _OFTEN))


@dataclass
class Follower:
    """Reports to the leader, and takes its orders.

    publish   takes what the leader shows of the job
    known   what the leader knows of the whole job
    """

    node: Agent
    orders: NodeAgent
    publish: Callable[[node_messages.Published], None]
    known: Known | None = field(default=None, init=False)
    _next_s: float = field(default=0.0, init=False)

    def look(self) -> bool:
        """Time has passed: report how the ranks stand; returns whether it was time for that."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + interval_s(self.node.peers.size)
        self.node.peers.to_leader(self.node.rows_of(self.node.ranks_here))
        return True

    # Reports.

    def report(self, report: node_messages.Report) -> None:
        """What has happened on this node, which the leader answers."""
        node, peers = self.node, self.node.peers
        match report:
            case node_messages.Said(rank=rank, message=message):
                if isinstance(message, from_rank.ScriptError):
                    node.note_script_error(node.slots[rank], message)
                report = report.encoded(len(node.slots), node.rows_of([rank]))
            case SpawnFailed(rank=rank, reason=reason):
                node.log("spawn_failed", rank=rank, reason=reason)
            case RankExited():
                if not report.is_finish:
                    node.note_failure(report)
                node.log_exit(report, {})
                peers.to_leader(node.rows_of([report.rank], is_awaited=True))
        peers.to_leader(report)

    # Orders.

    def take_order(self, order: node_messages.OfLeader | Refused) -> None:
        """The leader has sent something."""
        node = self.node
        why_unfit = node_messages.why_unfit(order, len(node.slots))
        if why_unfit:
            order = Refused(f"{type(order).__name__}: {why_unfit}")
        match order:
            case node_messages.Rows(now_ns=now_ns, rows=theirs):
                node.copy_in(theirs, now_ns)
            case node_messages.Forward():
                self._forward(order)
            case node_messages.Published():
                self.publish(order)
            case meeting.SparePools():
                node.peers.note_pools(order)
            case Known():
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
            case _ if isinstance(order, node_messages.Order):
                self.orders.carry_out(order)
            case _:
                node.log("message_refused", reason=f"{type(order).__name__} is no order")

    def _forward(self, order: node_messages.Forward) -> None:
        node = self.node
        message = order.message(len(node.slots))
        if isinstance(message, Refused):
            node.log("message_refused", reason=message.reason)
            return
        for rank, pid in order.to:
            self.orders.forward(rank, pid, message)

    def give_up(self, reason: str, kind: str = "fail") -> None:
        """This node has no part in the job any more: its ranks end.

        kind   of the verdict
        """
        node = self.node
        if node.verdict is not None:
            return
        node.log("node_given_up", reason=reason)
        node.give_up(reason, kind)

    def _conclude(self, order: meeting.Concluded) -> None:
        node = self.node
        if node.verdict is not None:
            return
        first = node.first_failure.found
        if order.kind != "done" and (first is None or first.exit_code != order.exit_code):  # the launchers end alike
            node.first_failure.note(Failure(node.here[0].rank, 0, order.exit_code, order.reason), is_new_incident=True)
        if order.kind == "restart":
            logger.warning("all ranks start again: %s", order.reason)
        node.log("group_given_up", kind=order.kind, reason=order.reason)
        node.end_by(order.ended_by)
        node.hear_conclusion(Verdict(order.kind, order.reason, order.has_progress, reason_kind=order.reason_kind))
