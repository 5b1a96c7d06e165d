"""A follower: the agent of a node that does not lead. It reports what happens to its ranks, and carries out orders.

Processes, standbys, records and logs are each node's own; what is decided comes from the leader. What another leader
would have to know is noted in the slots (`succession.py`). Begin with `Follower.take_order` and `Follower.forward`.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttprun import recovery
from ttprun.agent.checkpoints.checkpoints import NO_RECORD, own_part
from ttprun.agent.cluster import board_rows, record_copies
from ttprun.agent.core.failures import Failure
from ttprun.agent.core.node import Node
from ttprun.agent.core.orders import Orders
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.launcher.verdict import Verdict
from ttprun.agent.processes.process_watch import Watch
from ttprun.agent.processes.standby_watch import StandbyWatch
from ttprun.agent.repair import fingerprints
from ttprun.agent.repair.replays import why_not_alike
from ttprun.agent.report.status import StatusPublisher
from ttprun.chaos.injections import Injections
from ttprun.protocol import channel, from_rank, nodes, to_rank
from ttprun.protocol.codec import Refused, decode, encode
from ttprun.recovery.members import Ties
from ttprun.state.files import FileEntry, write_file

logger = logging.getLogger("ttprun")

_EVERY_S = 0.25


@dataclass
class Follower:
    """Reports to the leader, and takes its orders.

    lose    called with the leader's number and the reason if it is lost
    known   what the leader knows of the whole job
    """

    node: Node
    orders: Orders
    standby_watch: StandbyWatch
    watch: Watch
    status: StatusPublisher
    injections: Injections
    lose: Callable[[int, str], None] = field(init=False)
    known: nodes.Known | None = field(default=None, init=False)
    _next_s: float = field(default=0.0, init=False)

    def look(self) -> None:
        """Time has passed: report how the ranks stand."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _EVERY_S
            self.node.peers.to_leader(board_rows.rows_of(self.node, self.node.here))
            for silent in self.node.peers.silent():
                self.lose(silent, f"nothing was heard of it for {self.node.peers.unheard_s(silent):.0f} s")

    # Reports.

    def report(self, event: recovery.Event) -> None:
        """What has happened to a rank, which the leader's state machine answers."""
        peers, node = self.node.peers, self.node
        match event:
            case recovery.RankStarted(rank=rank, pid=pid):
                peers.to_leader(nodes.Started(rank, pid))
            case recovery.SpawnFailed(rank=rank, reason=reason):
                peers.to_leader(nodes.NotStarted(rank, reason))
            case recovery.RankUnprotected(rank=rank, reason=reason):
                self.forward(node.slots[rank], from_rank.Unprotected(reason))
            case recovery.RankExited(rank=rank, pid=pid):
                slot = node.slots[rank]
                slot.exit_code = -event.signal if event.signal is not None else event.code or 0
                slot.cause = event.reason
                ended = nodes.Ended(
                    rank=rank,
                    pid=pid,
                    code=slot.exit_code,
                    boundary=event.boundary,
                    is_script_error=event.is_script_error,
                    device_fault=event.device_fault,
                    reason=event.reason,
                    traceback=slot.traceback,
                    now_ns=time.monotonic_ns(),
                    row=board_rows.row_of(node, slot),
                )
                peers.to_leader(ended)
            case recovery.StopAsked(reason=reason):
                peers.to_leader(nodes.EndAsked(reason, node.ended_by))
            case _:
                node.log("not_reported", what=type(event).__name__)

    def forward(self, slot: RankSlot, message: Any) -> None:
        """Forward what a rank reports, with its row of the board; what this agent needs of it is noted."""
        node = self.node
        known: dict[int, str] = {}
        match message:
            case from_rank.RowChanged():
                board_rows.share(node, [slot])
                return
            case from_rank.Present():
                slot.main_thread = message.main_thread
                slot.greet()
            case from_rank.Protected():
                slot.is_protected = slot.had_torch = True
            case from_rank.Unprotected(reason=reason):
                slot.unprotected = slot.unprotected or reason
            case from_rank.Hindered(reason=reason):
                slot.hindrance = reason
            case from_rank.TrainsAlone():
                slot.ties = Ties.ALONE
            case from_rank.Joined():
                slot.ties = Ties.JOINED
            case from_rank.Reissued():
                slot.is_catching_up = False
            case from_rank.Faulted():
                slot.is_catching_up = True
                slot.note_boundary(node.board)
            case from_rank.Frozen(boundary=boundary):
                known = {boundary: fingerprints.of(node, slot, boundary)}
        line = encode(message).decode().rstrip("\n")
        said = nodes.Said(slot.rank, slot.pid, line, time.monotonic_ns(), board_rows.row_of(node, slot), known)
        node.peers.to_leader(said)

    # Orders.

    def take_order(self, _: int, order: nodes.OfLeader | Refused) -> None:
        """The leader has sent something."""
        node = self.node
        match order:
            case nodes.Rows(now_ns=now_ns, rows=theirs):
                board_rows.copy_in(node, theirs, now_ns)
            case nodes.Begin(generation=generation, is_resumed=is_resumed):
                self._note_generation(generation)
                for slot in node.here:
                    self.watch.welcome(slot, is_replacement=is_resumed)
            case nodes.Tell():
                self._tell(order)
            case nodes.News():
                self._pass_on(order)
            case nodes.Spawn(rank=rank, generation=generation):
                self._note_generation(generation)
                self._spawn(rank, generation)
            case nodes.GiveRecords(ranks=ranks):
                for rank in ranks:
                    node.peers.to_leader(nodes.Records(rank, record_copies.give(node, rank)))
            case nodes.Kill(rank=rank, reason=reason):
                if not order.keeps_evidence:
                    node.recorder_of(node.slots[rank]).evidence.clear()
                self.orders.kill_rank(recovery.KillRank(rank, reason))
            case nodes.Replay():
                self._replay(order)
            case nodes.VoidBeyond(boundary=boundary):
                node.void_beyond(boundary)
            case nodes.Recovered():
                node.first_failure.forget()
                self.standby_watch.refill()
            case nodes.StorePart():
                self._store_part(order)
            case nodes.GoBack():
                self._note_generation(order.generation)
                why_not = self.orders.rewinds.go_back_here(order)
                if why_not:
                    node.peers.to_leader(nodes.Differs(order.ranks[0], order.generation, why_not))
            case nodes.Published():
                self.status.take(order)
            case nodes.Strike():
                self.injections.strike_here(order)
            case nodes.Rooms():
                node.peers.note_rooms(order)
            case nodes.Known():
                self.known = order
            case nodes.Master(where=where):
                node.move_master(where)
            case nodes.Deposed(reason=reason):
                self.give_up(f"{node.peers.leaders_name} goes on without this node: {reason}")
            case nodes.Concluded():
                self._conclude(order)
            case nodes.Regroup():
                node.regroup = order
                node.log("regroup", nodes=order.size, node=order.node, reason=order.reason)
                node.conclude(Verdict("resize", order.reason))
            case Refused(reason=reason):
                node.log("message_refused", reason=reason)
                logger.warning("a message of the agent that leads is ignored: %s", reason)
            case _:
                node.log("message_refused", reason=f"{type(order).__name__} is no order")

    def _spawn(self, rank: int, generation: int) -> None:
        slot = self.node.slots[rank]
        slot.is_catching_up = True
        if slot.awaits_order:  # its first process has been started with this node's
            slot.awaits_order = False
            self.watch.welcome(slot, is_replacement=True)
        else:
            self.orders.spawn_rank(recovery.SpawnRank(rank, generation))

    def _note_generation(self, generation: int) -> None:
        self.node.job = replace(self.node.job, generation=generation)

    def _tell(self, order: nodes.Tell) -> None:
        node = self.node
        slot = node.slots[order.rank]
        if slot.pid != order.pid or not slot.is_present:
            return  # it is of a process that has ended
        message = decode(order.line.encode(), channel.KNOWN)
        if isinstance(message, to_rank.Freeze):
            self._note_generation(message.generation)
        if isinstance(message, to_rank.Replay | to_rank.Resume):
            message = replace(message, skip_lines=node.lines_since(slot, message.boundary))
        if isinstance(message, Refused):
            node.log("message_refused", reason=message.reason)
            return
        slot.handler.channel.send(message)

    def _pass_on(self, news: nodes.News) -> None:
        message = decode(news.line.encode(), channel.KNOWN)
        if not isinstance(message, from_rank.Put):
            self.node.log("message_refused", reason=f"{type(message).__name__} is no news")
            return
        for slot in self.node.here:
            if slot.rank != news.rank:
                slot.send_news(message)

    def _replay(self, order: nodes.Replay) -> None:
        node = self.node
        slot = node.slots[order.rank]
        mine = fingerprints.of(node, slot, order.boundary)
        why_not = why_not_alike(order.rank, order.source, order.boundary, mine, order.marks)
        if why_not:
            node.peers.to_leader(nodes.Differs(order.rank, order.generation, why_not))
            return
        skip_lines = node.lines_since(slot, order.boundary)
        is_joining, is_contradicted = order.is_joining, order.is_contradicted
        slot.send(
            to_rank.Replay(
                order.generation, order.boundary, skip_lines, is_joining=is_joining, is_contradicted=is_contradicted
            )
        )

    def _store_part(self, order: nodes.StorePart) -> None:
        """Write what the records have of a rank, dead or alive."""
        entry, why_not = FileEntry(bytes=0, xxh3="0" * 32), ""
        try:
            packed = own_part(self.node, self.node.slots[order.rank], order.boundary)
            entry = write_file(Path(order.path), [packed])
        except KeyError:
            why_not = NO_RECORD
        except OSError as error:
            why_not = f"{order.path} cannot be written on {self.node.peers.name_of(self.node.peers.node)}: {error}"
        stored = nodes.PartStored(order.rank, order.boundary, entry.bytes, entry.xxh3, why_not)
        self.node.peers.to_leader(stored)

    def give_up(self, reason: str, kind: str = "fail") -> None:
        """This node has no part in the job any more: its ranks end.

        kind   of the verdict
        """
        node = self.node
        if node.verdict is not None:
            return
        node.log("node_given_up", reason=reason)
        failure = Failure(node.here[0].rank, 0, -signal.SIGTERM, reason)
        node.first_failure.note(failure, is_new_incident=True)
        node.conclude(Verdict(kind, reason))

    def _conclude(self, order: nodes.Concluded) -> None:
        node = self.node
        if node.verdict is not None:
            return
        if order.kind != "done" and node.first_failure.found is None:
            node.first_failure.note(Failure(node.here[0].rank, 0, order.exit_code, order.reason), is_new_incident=True)
        if order.kind == "restart":
            logger.warning("all ranks start again: %s", order.reason)
        node.log("group_given_up", kind=order.kind, reason=order.reason)
        node.ended_by = order.ended_by
        node.conclude(Verdict(order.kind, order.reason, order.has_progress))
