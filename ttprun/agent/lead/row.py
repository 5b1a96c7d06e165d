"""A row: what is known of one rank where it is decided, whichever node it is on and whichever process it has now.

The processes are at their nodes (`process.py`); what happens to them comes as reports, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ttprun.agent.node.stored_states import Stored
from ttprun.protocol import to_rank
from ttprun.protocol.board import Board, Field
from ttprun.protocol.from_rank import GroupJournal
from ttprun.protocol.meeting import Legacy
from ttprun.protocol.rank_events import RankExited


@dataclass
class Row:
    """One rank of the job.

    forward        has the node of a rank send a message to a process; given the rank, the pid, and the message
    is_here        the rank is on this node
    pid            of its process, whose messages are heard; 0: there is none
    is_present     the process has greeted
    is_protected   its hooks have been heard
    lost_boundary  how far its script had come, if it is lost
    stored         what it goes back to, or has gone back to last: a snapshot, a checkpoint, its own state
    script_error   of the exception that has ended its script
    main_thread    ident of its main thread
    reported_in    newest generation in which it has reported something to the others, mostly its port
    journal        what the process has issued since the boundary at which it waits
    divergence     how its weights differ from the others', if they do: it is lost, or will be at its next boundary
    fingerprints   boundary -> what replicas have alike in its records of it, hashed
    state, cpu_s   letter of its process's state, and its processor time, as its node, another one, reports it
    noted_ns       its times on the board, on that node's clock
    """

    rank: int
    local_rank: int
    forward: Callable[[int, int, Any], None]
    is_here: bool = True
    pid: int = 0
    is_present: bool = False
    is_protected: bool = False
    is_finished: bool = False
    is_lost: bool = False
    lost_boundary: int = 0
    stored: Stored | None = None
    script_error: str = ""
    main_thread: int = 0
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

    def greet(self, main_thread: int) -> None:
        """The process has greeted."""
        self.main_thread = main_thread
        self.is_present = True

    def protect(self) -> None:
        """The hooks of its process have been heard."""
        self.is_protected = True

    def report_in(self, generation: int) -> None:
        """The process has reported something to the others."""
        self.reported_in = generation

    def take_journal(self, journal: dict[str, GroupJournal]) -> None:
        """What the process has issued since the boundary at which it waits."""
        self.journal = journal

    def diverge(self, how: str) -> None:
        """Its weights are found to differ from the others': it is to wait at its next boundary."""
        self.divergence = how
        self.send(to_rank.StopDivergent())

    def forget_divergence(self) -> None:
        """It has the others' weights again, or the next comparison finds that it has not."""
        self.divergence = ""

    def note_error(self, error: str) -> None:
        """An exception ends its script."""
        self.script_error = error

    def rewind_to(self, stored: Stored | None) -> None:
        """What it goes back to; None: it begins anew."""
        self.stored = stored

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

    def void_beyond(self, boundary: int) -> bool:
        """Whether it had recorded more than this before it was lost, which is void."""
        is_beyond = self.lost_boundary > boundary
        self.lost_boundary = min(self.lost_boundary, boundary)
        return is_beyond

    def go_back_to(self, boundary: int) -> None:
        """The rank goes back: what it had done beyond the boundary is void."""
        self.lost_boundary = boundary
        self.is_finished = False
        self.forget_divergence()
        self.journal = {}
