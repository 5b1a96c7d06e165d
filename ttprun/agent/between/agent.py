"""One agent: the node, and what is decided if it leads, on the ground that both share.

What a node's parts see of it is its `Node`, and the parts of what is decided see its `Lead`; only those between the two
see both. An agent that does not lead is a `Follower`: it reports what happens to its ranks, and carries out orders.
Processes, standbys, records and logs are each node's own; what is decided comes from the leader. How the ranks stand is
sent as rows of the board, and written to the board of the other node.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ttprun import recovery
from ttprun.agent.base.ground import Failure, FirstFailure, Verdict
from ttprun.agent.base.peers import Peers
from ttprun.agent.lead.rows import Carrier, Lead, Row
from ttprun.agent.node.node import Node, Process
from ttprun.capture.position import disk_cache
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol import from_rank, meeting, node_messages
from ttprun.protocol.board import FINISHED, Board, Field
from ttprun.protocol.codec import Refused
from ttprun.protocol.meeting import Known
from ttprun.protocol.rank_events import RankExited, SpawnFailed

logger = logging.getLogger("ttprun")

_EVERY_S = 0.25
_OFTEN = 128  # nodes that report so often: the agent of more is at nothing else
_RARELY = 4.0


class Agent(Node, Lead):
    """That of one launcher.

    served   a store of this agent's, at which the ranks meet; it lasts longer than the group
    """

    def __init__(self, config: Config, run: RunDirectory, is_python: bool, job: recovery.Job) -> None:
        super().__init__(config, run, is_python, job.settings.rungs)
        self.job = job
        self.slots = []
        self.here = []
        self.loops = None
        self.board_fd = -1
        self._past = set()
        self.served: object = None

    def begin_group(self, ranks: list[tuple[int, int]], peers: Peers | None = None) -> None:
        """New ranks: `ranks` is (global rank, local rank) of each that is on this node.

        peers   the agents of the other nodes; None: there are none
        """
        self.peers = peers or Peers(ranks_per_node=len(ranks))
        self.loops = None if self.peers.address else disk_cache.files()
        for slot in self.here:
            slot.close()
        if self.board_fd >= 0:
            os.close(self.board_fd)
        self.board_fd, self._board = Board.create(self.world_size)
        self.here = [Process.create(rank, local, self.slot_bytes, bool(self.peers.address)) for rank, local in ranks]
        self.slots = [
            Row(rank, rank % self.peers.ranks_per_node, lambda *of: self.forward(*of), self.is_here(rank))
            for rank in range(self.world_size)
        ]
        self.verdict = None
        self.is_concluded_elsewhere = False
        self.is_settled.clear()
        self.first_failure = FirstFailure()
        self.shared.clear()

    @property
    def has_killed_ones(self) -> bool:
        """Whether a signal has ended a process in a job that is done: its rank is away, or its script had ended."""
        return bool(self.job.away) or any(slot.handler.proc.poll() for slot in self.here)

    @property
    def has_finished(self) -> bool:
        """The scripts of all ranks of the job have come to their ends; their processes may still be there."""
        ended = (self.board.get(slot.rank, Field.ENDED) for slot in self.slots)
        recorded = (self.board.get(slot.rank, Field.RECORDED) for slot in self.slots)
        is_any_lost = any(slot.is_lost for slot in self.here) or any(slot.is_lost for slot in self.slots)
        is_any_lost = is_any_lost or self.first_failure.found is not None
        has_ended = all(is_over or at == FINISHED for is_over, at in zip(ended, recorded, strict=True))
        return bool(self.slots) and has_ended and not is_any_lost


@dataclass
class Follower:
    """Reports to the leader, and takes its orders.

    publish   takes what the leader shows of the job
    known   what the leader knows of the whole job
    """

    node: Agent
    orders: Carrier
    publish: Callable[[node_messages.Published], None]
    known: Known | None = field(default=None, init=False)
    _next_s: float = field(default=0.0, init=False)

    def look(self) -> bool:
        """Time has passed: report how the ranks stand; returns whether it was time for that."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        # Each node of a large group reports less often.
        self._next_s = now + _EVERY_S * min(_RARELY, max(1.0, self.node.peers.size / _OFTEN))
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
        node.ended_by = order.ended_by
        node.hear_conclusion(Verdict(order.kind, order.reason, order.has_progress, reason_kind=order.reason_kind))
