"""What the node and the lead of one agent stand on: its run, its thread, its log, the board, the other agents.

How a group of ranks ends is noted here too, as both may find it out. Read the attributes of `Ground` first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ttprun.agent.base.loop import Calls, Domains
from ttprun.agent.base.peers import Peers
from ttprun.config import Config
from ttprun.observe.events import EventLog
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.board import Board, Field
from ttprun.protocol.meeting import Regroup
from ttprun.protocol.rank_events import MismatchFound, RankExited
from ttprun.protocol.reason import Reason
from ttprun.state.cost_limits import parse_interval

logger = logging.getLogger("ttprun")


@dataclass
class Slot:
    """The place of one rank, as its node and what is decided each know it.

    pid            of its process; 0: there is none
    is_present     the process has greeted
    is_protected   its hooks have been heard
    script_error   of the exception that has ended its script
    main_thread    ident of its main thread
    lost_boundary  how far its script had come, if it is lost
    """

    rank: int
    local_rank: int
    _: KW_ONLY
    pid: int = 0
    is_present: bool = False
    is_protected: bool = False
    is_finished: bool = False
    is_lost: bool = False
    script_error: str = ""
    main_thread: int = 0
    lost_boundary: int = 0


class FaultInjection:
    """Faults on purpose: none here. A run that allows them has `ttprun.chaos.injections.Injections`, a companion."""

    def begin(self) -> None:
        """The ranks of the first group have been started."""

    def order(self, fault: str, by: str) -> str:
        """Take an order; returns the answer for the user. Raises ValueError if it cannot be carried out."""
        raise ValueError("this run was started without --allow-faults")

    def check(self, fault: str) -> None:
        """Raise ValueError if nothing is called so."""

    def waiting_in(self, rank: int) -> list[Any]:
        """The faults for a process of that rank when it starts."""
        return []

    def greeted(self, slot: Any) -> None:
        """A process reads messages now."""

    def forked(self, slot: Any) -> None:
        """A replacement has been started, and has not said a word yet."""

    def answered(self) -> None:
        """The ranks know of the job's end."""

    def next_timer_s(self) -> float | None:
        """The next time for `pass_time`, in monotonic seconds."""
        return None

    def pass_time(self) -> None:
        """Carry out what is due."""

    def struck(self, slot: Any, message: Any) -> None:
        """A rank reports that a fault has struck it."""

    def failed(self, slot: Any, message: Any) -> None:
        """A rank reports that it could not cause a fault."""

    def strike_here(self, strike: Any) -> None:
        """Have a fault strike this node."""


class Ground:
    """What all parts of one agent share.

    All but `call`, `log` and `is_settled` is for the supervisor's thread. What may wait for a process or a disk goes
    `in_background`, on a thread of its own: heartbeats to other nodes, and all other ranks, depend on the supervisor's.

    is_python      False: the ranks run the user's own program (--no-python)
    rungs          kinds of recovery that may be used
    interval       between two snapshots
    report         called with what has happened on this node: the agent that leads takes it, this one or another
                   (set by `launcher/group.py`)
    selector       what the supervisor waits on; the data of a key is the function to call when it is ready
    peers          the agents of the other nodes
    generation     of the job, as far as this agent knows
    is_in_incident the machine in this agent answers a fault
    is_running     the machine in this agent does not expect the ranks to stand still
    is_unprotected no rank can be replaced, as far as the machine in this agent knows
    verdict        set when the present group must be restarted, has failed or is done; None while it lives
    is_settled     there is a verdict, or nobody who would come to one
    is_paused      nobody decides: the group is being ended or started, or the supervisor has failed
    is_broken      the supervisor has failed: nothing is decided any more, and the job goes on as under torchrun
    first_failure  the root cause of what the present group suffers
    is_concluded_elsewhere  the agent that leads has ended the group, and says why
    is_deposed     this agent led, and another one may lead the job by now
    shared         ranks whose rows of the board other nodes are about to get, see `share`
    ended_by       the signal to the launcher of some node that ends the job; 0 while there is none
    domains        runs what protection does not need: its failures stay its own
    """

    report: Callable[[node_messages.Report], None]

    def __init__(self, config: Config, run: RunDirectory, is_python: bool, rungs: Collection[str]) -> None:
        self.config = config
        self.run = run
        self.is_python = is_python
        self.rungs = frozenset(rungs)
        self.interval = parse_interval(config.snapshot_every)
        self.selector = selectors.DefaultSelector()
        calls = Calls(self.selector)
        self.call, self.in_background, self.wake = calls.add, calls.in_background, calls.wake
        self.peers = Peers()
        self.generation = 0
        self.is_in_incident = self.is_unprotected = False
        self.is_running = True
        self._board: Board | None = None
        self.verdict: Verdict | None = None
        self.is_settled = threading.Event()
        self.is_broken = False
        self.is_paused = False
        self.first_failure = FirstFailure()
        self.is_deposed = False
        self.ended_by = 0
        self.is_concluded_elsewhere = False
        self._events = EventLog(run.events)
        self._log_lock = threading.Lock()
        self.domains = Domains(self.log)
        self.shared: set[int] = set()
        self._stepped = 0

    @property
    def world_size(self) -> int:
        """Ranks of the present group, on all nodes."""
        return self.peers.size * self.peers.ranks_per_node

    @property
    def ranks_here(self) -> range:
        """The ranks of this node."""
        first = self.peers.node * self.peers.ranks_per_node
        return range(first, first + self.peers.ranks_per_node)

    def is_here(self, rank: int) -> bool:
        """Whether a rank is on this node."""
        return self.peers.node_of(rank) == self.peers.node

    @property
    def keeps_mirrors_twice(self) -> bool:
        """Mirrors are kept on the next node, too."""
        return self.config.buddy == "node" and self.peers.size > 1

    def share(self, *ranks: int) -> None:
        """Let the other nodes know how these ranks stand, at the end of this turn: ranks there wait for it."""
        self.shared.update(ranks)

    def has_stepped(self) -> bool:
        """Whether ranks of this node have completed a step together with all others since this was asked last."""
        applied, before = max(self.board.get(rank, Field.APPLIED) for rank in self.ranks_here), self._stepped
        self._stepped = applied
        return applied != before

    # The board: the page on which the ranks note how far they are.

    @property
    def has_board(self) -> bool:
        """A group has been begun."""
        return self._board is not None

    @property
    def board(self) -> Board:
        """The page on which the ranks note how far they are; only once a group has been begun."""
        assert self._board is not None
        return self._board

    def board_row(self, rank: int) -> list[int]:
        """A rank's row of the board, as it is now; `Field` has its columns."""
        return self.board.row(rank).tolist()

    def set_back(self, rank: int, boundary: int) -> None:
        """What a rank has done beyond a boundary is void; it has no process now."""
        self.board.set(rank, Field.RECORDED, boundary)
        self.board.set(rank, Field.APPLIED, boundary)
        self.board.forget_process(rank)

    def void_beyond(self, boundary: int, slots: Iterable[Slot]) -> None:
        """What lost ranks have recorded beyond a boundary is void: survivors wait for their replacements' records.

        slots   their rows, or their processes
        """
        for slot in slots:
            if slot.lost_boundary > boundary:
                slot.lost_boundary = boundary
                self.board.set(slot.rank, Field.RECORDED, boundary)

    # How a group goes on, and how it ends.

    def break_down(self) -> None:
        """The supervisor has failed."""
        self.is_broken = self.is_paused = True
        self.is_settled.set()

    def hear_conclusion(self, verdict: Verdict) -> None:
        """The agent that leads has ended this group."""
        self.is_concluded_elsewhere = True
        self.conclude(verdict)

    def conclude(self, verdict: Verdict) -> None:
        """This group has come to its end; torch's agent asks for the verdict."""
        self.verdict = verdict
        self.is_settled.set()
        code = 1 if self.first_failure.found is None else self.first_failure.found.exit_code
        how = (verdict.kind, verdict.reason, verdict.has_progress, code, self.ended_by, verdict.reason_kind)
        self.peers.conclude(meeting.Concluded(*how))

    def give_up(self, reason: str, kind: str = "fail", is_new_incident: bool = True) -> None:
        """This node's ranks end, for a reason that lies with none of them.

        kind   of the verdict
        """
        failure = Failure(self.ranks_here[0], 0, -signal.SIGTERM, reason)
        self.first_failure.note(failure, is_new_incident)
        self.conclude(Verdict(kind, reason))

    def note_failure(self, failure: Failure | RankExited) -> None:
        """A rank has failed: the root cause of what the group suffers, if nothing has before it."""
        if isinstance(failure, RankExited):
            failure = Failure(failure.rank, failure.pid, failure.exit_code, failure.reason, failure.traceback)
        self.first_failure.note(failure, is_new_incident=not self.is_in_incident)

    # What is said of it.

    def log(self, event: str, **fields: object) -> None:
        """Append to the event log; a reason is written as its sentence, with its kind beside it if it has one."""
        reason = fields.get("reason")
        if isinstance(reason, Reason):
            fields |= {"reason": reason.text} | ({"reason_kind": reason.kind} if reason.kind else {})
        with self._log_lock:
            self._events.append(event, **{"at_s": time.monotonic()} | fields)

    def log_exit(self, event: RankExited, where: Mapping[str, int]) -> None:
        """A rank's process has ended; `where`: {"node": number} if that is on another node."""
        fields: dict[str, Any] = {"code": event.code, "signal": event.signal, "boundary": event.boundary}
        fields |= {"reason": event.reason, "at_s": event.at_s}
        self.log("rank_exited", rank=event.rank, pid=event.pid, **where, **fields)

    def refuse(self, rank: int, reason: str) -> None:
        """A rank has sent what is no message, which has no effect: what should have come instead has its deadline."""
        self.log("message_refused", rank=rank, reason=reason)
        logger.warning("a message of rank %d is ignored: %s", rank, reason)

    def report_mismatch(self, rank: int, generation: int, reason: Reason) -> None:
        """A rank is not what it should be: it cannot be repaired in this way.

        rank         global
        generation   in which that was found; of an older one it counts no more
        reason       which check has failed, and the two values
        """
        self.report(MismatchFound(at_s=time.monotonic(), rank=rank, generation=generation, reason=reason))

    def refuse_stored(self, rank: int, generation: int, error: Exception) -> None:
        """What a rank is to go back to cannot be used."""
        why = Reason("stored-state-unusable", f"its stored state cannot be used: {error}")
        self.report_mismatch(rank, generation, why)


@dataclass(frozen=True)
class Verdict:
    """What the supervisor reports to torch's agent when a group has come to its end.

    kind          "done", "restart", "fail"; "resize": the group starts again on other nodes; "leave": without this one
    reason        a sentence; empty for "done"
    has_progress  False: the same fault came back, the scheduler should not requeue
    regroup       the order to take part in the next group, with "resize"
    reason_kind   of the reason, see protocol/reasons.py; "": none
    first         the reason alone, without what became of the job's state
    """

    kind: str
    reason: str = ""
    has_progress: bool = True
    regroup: Regroup | None = None
    reason_kind: str = ""
    first: str = ""


_OF_A_PEER = re.compile(r"connection (was lost|closed|reset|refused)|timed out|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """How one rank has failed.

    exit_code   negative: the signal that has ended it
    reason      in a phrase; "" if it is not known
    traceback   of the exception or the crash, "" if there is none or it has been shown
    """

    rank: int
    pid: int
    exit_code: int
    reason: str = ""
    traceback: str = ""

    @property
    def is_collateral(self) -> bool:
        """It looks like the consequence of another rank's failure."""
        return bool(_OF_A_PEER.search(self.reason))

    def as_torch_reports_it(self, local_rank: int, error_file: str) -> ProcessFailure:
        """For torch's summary; the traceback goes into the rank's error file, unless `record` has written one."""
        if self.traceback and not os.path.exists(error_file):
            extra = {"py_callstack": self.traceback, "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError), open(error_file, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": self.reason, "extraInfo": extra}}, file)
        return ProcessFailure(local_rank, self.pid, self.exit_code, error_file)


class FirstFailure:
    """Keeps the root cause of what a group suffers now.

    found   None while nothing has failed
    """

    def __init__(self) -> None:
        self.found: Failure | None = None

    def note(self, failure: Failure, is_new_incident: bool) -> None:
        """A rank has failed; an incident that is over is no cause of a new one.

        is_new_incident   no incident is open: what was noted before is over
        """
        if self.found is None or is_new_incident or (self.found.is_collateral and not failure.is_collateral):
            self.found = failure

    @property
    def is_of_script(self) -> bool:
        """The script itself has ended a rank, by an exception or with an exit code."""
        return self.found is not None and self.found.exit_code > 0 and not self.found.is_collateral

    def forget(self) -> None:
        """What has failed is repaired: how the job ends does not follow from it."""
        self.found = None
