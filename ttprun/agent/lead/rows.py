"""What is decided, once a job: the job as the state machine sees it, and a row of each rank.

A row is what is known of one rank, whichever node it is on and whichever process it has now. The processes are at their
nodes (`node.py`): orders go out (`node_messages.Order`), and messages to processes; what comes of them comes back as
reports, in their order. Which node a rank is on changes nothing here but the way. Begin with `Lead`, `Wire.order_on`
and `Wire.report`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ttprun import recovery
from ttprun.agent.base.ground import Ground, Slot
from ttprun.agent.base.stored_states import Stored
from ttprun.observe.run_directory import RankStack
from ttprun.protocol import from_rank, node_messages, process_orders, to_rank
from ttprun.protocol.board import AWAITED, SHARED, Board, Field
from ttprun.protocol.from_rank import GroupJournal
from ttprun.protocol.meeting import BoardRow, Legacy
from ttprun.protocol.node_messages import Order, Report
from ttprun.protocol.rank_events import Event, RankExited

_LAST_PHASES = (recovery.JobPhase.PERSISTING, recovery.JobPhase.DRAINING, recovery.JobPhase.FAILED)
# Places in a row that was sent, and columns of the board.
_TIMES = [(SHARED.index(field), field) for field in (Field.SEEN_NS, Field.PULSE_NS)]
_AWAITED = [(SHARED.index(field), field) for field in AWAITED]
_PLAIN = [cell for cell in enumerate(SHARED) if cell not in (*_TIMES, *_AWAITED)]


@dataclass
class Row(Slot):
    """One rank of the job.

    forward        has the node of a rank send a message to a process; given the rank, the pid, and the message
    is_here        the rank is on this node
    pid            of its process, whose messages are heard
    stored         what it goes back to, or has gone back to last: a snapshot, a checkpoint, its own state
    reported_in    newest generation in which it has reported something to the others, mostly its port
    journal        what the process has issued since the boundary at which it waits
    divergence     how its weights differ from the others', if they do: it is lost, or will be at its next boundary
    fingerprints   boundary -> what replicas have alike in its records of it, hashed
    state, cpu_s   letter of its process's state, and its processor time, as its node, another one, reports it
    noted_ns       its times on the board, on that node's clock
    """

    forward: Callable[[int, int, Any], None]
    is_here: bool = True
    stored: Stored | None = None
    reported_in: int = -1
    journal: dict[str, GroupJournal] = field(default_factory=dict)
    divergence: str = ""
    fingerprints: dict[int, str] = field(default_factory=dict)
    state: str = ""
    cpu_s: float = 0.0
    noted_ns: dict[int, int] = field(default_factory=dict)

    def begin_process(self, pid: int) -> None:
        """A process has been started, of which nothing is known yet."""
        self.pid = pid
        self.is_present = self.is_protected = self.is_finished = self.is_lost = False
        self.script_error = ""
        self.main_thread = 0
        self.reported_in = -1
        self.journal = {}

    def send(self, message: Any) -> None:
        """Send to the process; its node holds the message till it has greeted, and drops it if it has ended."""
        self.forward(self.rank, self.pid, message)

    def send_if_present(self, message: Any) -> None:
        """Send what it need not hear if it has not greeted yet."""
        if self.is_present:
            self.send(message)

    def fault(self, boundary: int) -> None:
        """The script has ended by a transient error, and the process waits: from now on it is sent what is new.

        boundary   from which a repair goes on
        """
        self.lost_boundary = boundary
        self.reported_in = -1
        self.journal = {}
        self.send(to_rank.Heard())

    def end(self, ended: RankExited) -> None:
        """Its process has ended."""
        self.is_present = False
        self.is_finished, self.is_lost = ended.is_finish, not ended.is_finish
        self.lost_boundary = ended.boundary
        self.script_error = ""

    def lose(self, board: Board) -> None:
        """Its process is killed or out of reach: what it still sends is not heard."""
        self.is_lost, self.is_present, self.pid = True, False, 0
        self.lost_boundary = board.get(self.rank, Field.RECORDED)
        board.forget_process(self.rank)

    def inherit(self, legacy: Legacy | None, has_finished: bool) -> None:
        """What the next leader must know of a rank; None: the agent of its node is lost, too."""
        if legacy is None:
            self.is_finished, self.pid = has_finished, 0
            return
        self.begin_process(legacy.pid)
        self.is_present, self.is_protected = legacy.is_present, legacy.is_protected
        self.is_finished, self.is_lost = legacy.is_finished, legacy.is_lost
        self.lost_boundary = legacy.boundary


class Eyes(Protocol):
    """What is decided sees of its own node without a message; of other nodes it does not know that."""

    def command(self) -> list[str]:
        """The script of the ranks, and its arguments."""

    def newest(self, rank: int) -> int | None:
        """The newest boundary that a process for this rank, which has none now, can go back to; None: there is none."""

    def stored(self, rank: int, boundary: int) -> Stored | None:
        """What a rank has kept of a boundary; None if it is not the newest that it keeps."""

    def state_of(self, rank: int) -> tuple[str, float]:
        """State letter of the process of a rank, and its processor time; ("", 0.0) if there is none."""

    def own_part(self, rank: int, boundary: int) -> bytes:
        """What a checkpoint has of a rank alone. Raises KeyError if there is no record of the boundary."""

    def take_all(self, without: int | None = None) -> Callable[[], tuple[RankStack, ...]]:
        """A function that takes the stacks of this node's living ranks, but for one."""

    def take_stack(self, rank: int, is_stopped: bool) -> Callable[[], RankStack]:
        """A function that takes the stack of one rank, which may hang."""

    def end_at_once(self, rank: int) -> None:
        """Kill the process of a rank, and wait until it does nothing more."""


class Lead(Ground):
    """What is decided for the ranks of all nodes.

    job       what the state machine knows
    slots     rows of all ranks of the job, by rank
    eyes      what is seen of this node without a message
    advance   called with what is found out and the machine has to answer; within a decision it is next
    order     called with a rank, and with what its node is to carry out
    """

    slots: list[Row]
    eyes: Eyes
    advance: Callable[[Event], None]
    order: Callable[[int, Order], None]
    forward: Callable[[int, int, Any], None]
    _job: recovery.Job

    @property
    def job(self) -> recovery.Job:
        return self._job

    @job.setter
    def job(self, job: recovery.Job) -> None:
        self._job, self.generation = job, job.generation
        self.is_in_incident, self.is_running = job.incident is not None, job.phase is recovery.JobPhase.RUNNING
        self.is_unprotected = bool(job.unprotected_reason)

    def stored_of(self, rank: int) -> Stored | None:
        """What a rank goes back to."""
        return self.slots[rank].stored

    @property
    def is_ending(self) -> bool:
        """This agent leads, and the job saves its state and ends: nobody can join it any more."""
        is_over = self.verdict is not None and self.verdict.kind != "done"
        return is_over or bool(self.ended_by) or self.job.phase in _LAST_PHASES

    def note_script_error(self, slot: Row, message: from_rank.ScriptError) -> None:
        """An exception ends a script; before the first step its traceback is printed here, once."""
        if message.traceback and not any(other.script_error for other in self.slots):
            with contextlib.suppress(OSError):  # whoever read it has gone
                os.write(2, message.traceback.encode(errors="backslashreplace"))
        slot.script_error = message.error
        self.log("script_error", rank=slot.rank, error=message.error, traceback=message.detail)

    # Ranks that are alone, which keep their own state.

    def reached(self, rank: int, recorded: int) -> int:
        """How many steps a rank that is lost had completed; one that is not alone is known by what it had recorded."""
        is_alone = recovery.is_alone(self.job, rank)
        return self.board.get(rank, Field.APPLIED) if is_alone else recorded

    def report_what_is_left(self, lost: int) -> None:
        """A rank that is lost, and whose process does nothing more: let the machine know what it can go back to."""
        if not recovery.is_alone(self.job, lost):
            return
        boundary, rank = self.eyes.newest(lost), None if len(self.slots) == 1 else lost
        self.advance(recovery.SnapshotTaken(at_s=time.monotonic(), boundary=boundary, rank=rank, is_own=True))

    # How ranks stand, for the other nodes.

    def row_of(self, rank: int) -> BoardRow:
        """How one rank stands."""
        values, slot = [self.board.get(rank, field) for field in SHARED], self.slots[rank]
        how = self.eyes.state_of(rank) if slot.is_here else (slot.state, slot.cpu_s)
        return BoardRow(rank, values, *how)

    def rows_of(self, ranks: Iterable[int], is_awaited: bool = False) -> node_messages.Rows:
        """How these ranks, of any node, stand now.

        is_awaited   something has changed for which ranks of other nodes wait
        """
        return node_messages.Rows(time.monotonic_ns(), [self.row_of(rank) for rank in ranks], is_awaited)

    def send_shared(self) -> None:
        """Send the rows that ranks of other nodes wait for: of one rank or of many, it is one message to each node."""
        ranks, self.shared = sorted(self.shared), set()
        if ranks and self.peers.connected:
            self.peers.to_all(self.rows_of(ranks, is_awaited=True))

    def copy_in(self, rows: Iterable[BoardRow], now_ns: int) -> None:
        """Write how other nodes' ranks stand to our board, and wake who waits for it.

        now_ns   when they were sent, on the sender's clock
        """
        behind_ns = time.monotonic_ns() - now_ns
        for row in rows:
            slot = self.slots[row.rank]
            if slot.is_here:
                continue
            slot.state, slot.cpu_s = row.state, row.cpu_s
            ours, theirs = self.board.row(row.rank), row.values
            for at, column in _PLAIN:
                ours[column] = theirs[at]
            for at, column in _TIMES:
                if slot.noted_ns.get(column) != theirs[at]:  # moved anew each time, it would look new
                    ours[column] = theirs[at] + behind_ns if theirs[at] else 0
                    slot.noted_ns[column] = theirs[at]
            for at, column in _AWAITED:
                if ours[column] != theirs[at]:
                    self.board.announce(row.rank, column, theirs[at])


class Carrier(Protocol):
    """Carries out orders for the ranks of one node."""

    def carry_out(self, order: Order) -> None:
        """Carry out one order; returns at once."""

    def forward(self, rank: int, pid: int, message: Any) -> None:
        """Send to the process of a rank, with what only its node knows; it is held until the process has greeted."""


class Wire:
    """That of one group of ranks.

    own    carries out orders here
    take   called with what this node reports, one after the other
    """

    def __init__(self, node: Lead, own: Carrier) -> None:
        self._node = node
        self._own = own
        self.take: Callable[[Report], None] = lambda report: None
        self._reports: deque[Report] = deque()
        self._is_taking = False

    def report(self, report: Report) -> None:
        """Something has happened on this node; what happens because of it is taken after it."""
        self._reports.append(report)
        self.drain()

    def drain(self) -> None:
        """Have all taken that was reported here; after a failure this goes on behind what has failed."""
        if self._is_taking:
            return
        self._is_taking = True
        try:
            while self._reports:
                self.take(self._reports.popleft())
        finally:
            self._is_taking = False

    def order(self, rank: int, order: Order) -> None:
        """Have the node on which a rank is carry it out."""
        self.order_on(self._node.peers.node_of(rank), order)

    def order_on(self, number: int, order: Order) -> None:
        """Have a node carry it out."""
        if number == self._node.peers.node:
            self._own.carry_out(order)
        else:
            self._node.peers.send(number, order)
        self._note(order)

    def order_all(self, order: Order) -> None:
        """Have all nodes carry it out, this one last: the others do it meanwhile."""
        self._node.peers.to_all(order)
        self._own.carry_out(order)
        self._note(order)

    def forward(self, rank: int, pid: int, message: Any) -> None:
        """Have its node send a message to the process of a rank."""
        peers = self._node.peers
        if self._node.is_here(rank):
            self._own.forward(rank, pid, message)
        else:
            peers.forward(rank, pid, peers.line_of(message))

    def _note(self, order: Order) -> None:
        """What follows here from an order that was given."""
        node = self._node
        match order:
            case process_orders.KillRank(rank=rank, reason=reason):
                slot = node.slots[rank]
                if not slot.is_here:  # else it is logged when its stack is known
                    node.log("rank_killed", rank=rank, pid=slot.pid, reason=reason, stack="")
                slot.lose(node.board)
            case process_orders.ParkRank(rank=rank):
                node.slots[rank].lose(node.board)
            case process_orders.TakeBack(rank=rank, pid=pid):
                node.slots[rank].begin_process(pid)
                node.slots[rank].is_present = node.slots[rank].is_protected = True
            case process_orders.Rewind(ranks=ranks, boundary=boundary):
                for slot in (node.slots[rank] for rank in ranks):
                    slot.lost_boundary, slot.is_finished = boundary, False
                    slot.divergence, slot.journal = "", {}
                    if not slot.is_here:
                        node.set_back(slot.rank, boundary)
