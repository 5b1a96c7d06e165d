"""A follower: the agent of a node that does not lead. It reports what happens to its ranks, and carries out orders.

Processes, standbys, records and logs are each node's own; what is decided comes from the leader. How the ranks stand is
sent as rows of the board, and written to the board of the other node; times in a row are on the clock of the machine
that sends it, and are moved to ours. Begin with `Follower.take_order`, `Follower.report` and `send_shared`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ttprun.agent.lead.status_publisher import StatusPublisher
from ttprun.agent.node.life_signs import state_of
from ttprun.agent.node.node import Node, give_up, log_exit, note_failure, note_script_error
from ttprun.agent.node.node_agent import NodeAgent
from ttprun.agent.node.verdict import Failure, Verdict
from ttprun.protocol import from_rank, meeting, node_messages
from ttprun.protocol.board import AWAITED, SHARED, Field
from ttprun.protocol.codec import Refused
from ttprun.protocol.meeting import Known
from ttprun.protocol.rank_events import RankExited, SpawnFailed

logger = logging.getLogger("ttprun")

_EVERY_S = 0.25
_OFTEN = 128  # nodes that report so often: the agent of more is at nothing else
_RARELY = 4.0
# Places in a row that was sent, and columns of the board.
_TIMES = [(SHARED.index(field), field) for field in (Field.SEEN_NS, Field.PULSE_NS)]
_AWAITED = [(SHARED.index(field), field) for field in AWAITED]
_PLAIN = [cell for cell in enumerate(SHARED) if cell not in (*_TIMES, *_AWAITED)]


def row_of(node: Node, rank: int) -> node_messages.BoardRow:
    """How one rank stands."""
    values, slot = [node.board.get(rank, field) for field in SHARED], node.slots[rank]
    if not slot.is_here:
        return node_messages.BoardRow(rank, values, slot.state, slot.cpu_s)
    process = node.process(rank)
    with contextlib.suppress(OSError, ValueError, IndexError):
        if process.pid and not process.is_buried:
            return node_messages.BoardRow(rank, values, *state_of(process.pid))
    return node_messages.BoardRow(rank, values)


def rows_of(node: Node, ranks: Iterable[int], is_awaited: bool = False) -> node_messages.Rows:
    """How these ranks, of any node, stand now.

    is_awaited   something has changed for which ranks of other nodes wait
    """
    return node_messages.Rows(time.monotonic_ns(), [row_of(node, rank) for rank in ranks], is_awaited)


def send_shared(node: Node) -> None:
    """Send the rows that ranks of other nodes wait for: of one rank or of many, it is one message to each node."""
    ranks, node.shared = sorted(node.shared), set()
    if ranks and node.peers.connected:
        node.peers.to_all(rows_of(node, ranks, is_awaited=True))


def copy_in(node: Node, rows: Iterable[node_messages.BoardRow], now_ns: int) -> None:
    """Write how other nodes' ranks stand to our board, and wake who waits for it.

    now_ns   when they were sent, on the sender's clock
    """
    board, behind_ns = node.board, time.monotonic_ns() - now_ns
    for row in rows:
        slot = node.slots[row.rank]
        if slot.is_here:
            continue
        slot.state, slot.cpu_s = row.state, row.cpu_s
        ours, theirs = board.row(row.rank), row.values
        for at, column in _PLAIN:
            ours[column] = theirs[at]
        for at, column in _TIMES:
            if slot.noted_ns.get(column) != theirs[at]:  # moved anew each time, it would look new
                ours[column] = theirs[at] + behind_ns if theirs[at] else 0
                slot.noted_ns[column] = theirs[at]
        for at, column in _AWAITED:
            if ours[column] != theirs[at]:
                board.announce(row.rank, column, theirs[at])


def interval_s(nodes: int) -> float:
    """Seconds from one report of how ranks stand to the next: each node of a large group reports less often."""
    return _EVERY_S * min(_RARELY, max(1.0, nodes / _OFTEN))


@dataclass
class Follower:
    """Reports to the leader, and takes its orders.

    known   what the leader knows of the whole job
    """

    node: Node
    agent: NodeAgent
    status: StatusPublisher
    known: Known | None = field(default=None, init=False)
    _next_s: float = field(default=0.0, init=False)

    def look(self) -> bool:
        """Time has passed: report how the ranks stand; returns whether it was time for that."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + interval_s(self.node.peers.size)
        self.node.peers.to_leader(rows_of(self.node, [slot.rank for slot in self.node.here]))
        return True

    # Reports.

    def report(self, report: node_messages.Report) -> None:
        """What has happened on this node, which the leader answers."""
        node, peers = self.node, self.node.peers
        match report:
            case node_messages.Said(rank=rank, message=message):
                if isinstance(message, from_rank.ScriptError):
                    note_script_error(node, node.slots[rank], message)
                report = report.encoded(len(node.slots), rows_of(node, [rank]))
            case SpawnFailed(rank=rank, reason=reason):
                node.log("spawn_failed", rank=rank, reason=reason)
            case RankExited():
                if not report.is_finish:
                    note_failure(node, report)
                log_exit(node, report, {})
                peers.to_leader(rows_of(node, [report.rank], is_awaited=True))
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
                copy_in(node, theirs, now_ns)
            case node_messages.Forward():
                self._forward(order)
            case node_messages.Published():
                self.status.take(order)
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
                self.agent.carry_out(order)
            case _:
                node.log("message_refused", reason=f"{type(order).__name__} is no order")

    def _forward(self, order: node_messages.Forward) -> None:
        node = self.node
        message = order.message(len(node.slots))
        if isinstance(message, Refused):
            node.log("message_refused", reason=message.reason)
            return
        for rank, pid in order.to:
            self.agent.forward(rank, pid, message)

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
        first = node.first_failure.found
        if order.kind != "done" and (first is None or first.exit_code != order.exit_code):  # the launchers end alike
            node.first_failure.note(Failure(node.here[0].rank, 0, order.exit_code, order.reason), is_new_incident=True)
        if order.kind == "restart":
            logger.warning("all ranks start again: %s", order.reason)
        node.log("group_given_up", kind=order.kind, reason=order.reason)
        node.end_by(order.ended_by)
        node.hear_conclusion(Verdict(order.kind, order.reason, order.has_progress, reason_kind=order.reason_kind))
