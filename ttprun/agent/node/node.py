"""What all parts of the agent share: this node's ranks, the job as the state machine sees it, and how to let it decide.

A part is given the node, and by its constructor the other parts that it uses. Read the attributes of `Node` first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ttprun import recovery
from ttprun.agent.between.peers import Peers
from ttprun.agent.between.role import Role
from ttprun.agent.lead.row import Row
from ttprun.agent.node.loop import Calls, Domains
from ttprun.agent.node.process import Process
from ttprun.agent.node.verdict import Failure, FirstFailure, Verdict
from ttprun.capture.position import disk_cache
from ttprun.capture.records.boundary_record import Outline, read_outline
from ttprun.capture.records.recorder import Recorder
from ttprun.config import Config
from ttprun.introspect import children
from ttprun.observe.events import EventLog
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.board import FINISHED, Board, Field
from ttprun.protocol.from_rank import ScriptError
from ttprun.protocol.process_orders import Action
from ttprun.protocol.rank_events import Event, MismatchFound, RankExited
from ttprun.protocol.reason import Reason

_LOOK_AGAIN_S = 0.05
_LAST_PHASES = (recovery.JobPhase.PERSISTING, recovery.JobPhase.DRAINING, recovery.JobPhase.FAILED)


class Node:
    """The ranks of one node; in the leader's agent those of all nodes.

    All but `call`, `log` and `is_settled` is for the supervisor's thread. What may wait for a process or a disk goes
    `in_background`, on a thread of its own: heartbeats to other nodes, and all other ranks, depend on the supervisor's.

    is_python      False: the ranks run the user's own program (--no-python)
    job            what the state machine knows
    role           what this agent is to those of the other nodes, in the present group
    report         called with what has happened on this node: the agent that leads takes it, this one or another
    order          called with a rank, and with what its node is to carry out
    forward        called with a rank, the pid of its process, and a message for that
    selector       what the supervisor waits on; the data of a key is the function to call when it is ready
    slots          rows of all ranks of the job, by rank
    here           the processes of this node's ranks, by local rank
    peers          the agents of the other nodes
    loops          files in which earlier runs have met a training loop; None: on several nodes they may differ
    board_fd       of the board; -1 before the first group
    verdict        set when the present group must be restarted, has failed or is done; None while it lives
    is_settled     there is a verdict, or nobody who would come to one
    is_paused      nobody decides: the group is being ended or started, or the supervisor has failed
    is_broken      the supervisor has failed: nothing is decided any more, and the job goes on as under torchrun
    first_failure  the root cause of what the present group suffers
    is_concluded_elsewhere  the agent that leads has ended the group, and says why
    is_deposed     this agent led, and another one may lead the job by now
    shared         ranks whose rows of the board other nodes are about to get, see `share`
    served         a store of this agent's, at which the ranks meet; it lasts longer than the group
    ended_by       the signal to the launcher of some node that ends the job; 0 while there is none
    domains        runs what protection does not need: its failures stay its own
    """

    role: Role
    report: Callable[[node_messages.Report], None]
    order: Callable[[int, node_messages.Order], None]
    forward: Callable[[int, int, Any], None]

    def __init__(self, config: Config, run: RunDirectory, is_python: bool, job: recovery.Job) -> None:
        self.config = config
        self.run = run
        self.is_python = is_python
        self.job = job
        self.selector = selectors.DefaultSelector()
        calls = Calls(self.selector)
        self.call, self.in_background, self.wake = calls.add, calls.in_background, calls.wake
        self.slots: list[Row] = []
        self.here: list[Process] = []
        self.peers = Peers()
        self.loops: list[str] | None = None
        self.board_fd = -1
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
        self.served: Any = None
        self._past: set[int] = set()  # pids of ranks that have ended

    @property
    def _known(self) -> list[Process | Row]:
        return [*self.here, *self.slots]

    def is_here(self, rank: int) -> bool:
        """Whether a rank is on this node."""
        return self.peers.node_of(rank) == self.peers.node

    def process(self, rank: int) -> Process:
        """That of a rank of this node. Raises LookupError if the rank is on another one."""
        if not self.is_here(rank):
            raise LookupError(f"rank {rank} is on {self.peers.name_of(self.peers.node_of(rank))}")
        return self.here[rank - self.here[0].rank]

    def begin_group(self, ranks: list[tuple[int, int]], peers: Peers | None = None) -> None:
        """New ranks: `ranks` is (global rank, local rank) of each that is on this node.

        peers   the agents of the other nodes; None: there are none
        """
        self.peers = peers or Peers(ranks_per_node=len(ranks))
        self.loops = None if self.peers.address else disk_cache.files()
        world_size = len(ranks) * self.peers.size
        for slot in self.here:
            slot.close()
        if self.board_fd >= 0:
            os.close(self.board_fd)
        self.board_fd, self._board = Board.create(world_size)
        self.here = [Process.create(rank, local, self._slot_bytes, bool(self.peers.address)) for rank, local in ranks]
        self.slots = [
            Row(rank, rank % self.peers.ranks_per_node, self._forward, self.is_here(rank)) for rank in range(world_size)
        ]
        self.verdict = None
        self.is_concluded_elsewhere = False
        self.is_settled.clear()
        self.first_failure = FirstFailure()
        self.shared.clear()

    def _forward(self, rank: int, pid: int, message: Any) -> None:
        self.forward(rank, pid, message)

    def share(self, *ranks: int) -> None:
        """Let the other nodes know how these ranks stand, at the end of this turn: ranks there wait for it."""
        self.shared.update(ranks)

    def has_stepped(self) -> bool:
        """Whether ranks of this node have completed a step together with all others since this was asked last."""
        applied, before = max(self.board.get(slot.rank, Field.APPLIED) for slot in self.here), self._stepped
        self._stepped = applied
        return applied != before

    @property
    def has_killed_ones(self) -> bool:
        """Whether a signal has ended a process in a job that is done: its rank is away, or its script had ended."""
        return bool(self.job.away) or any(slot.handler.proc.poll() for slot in self.here)

    @property
    def has_finished(self) -> bool:
        """The scripts of all ranks of the job have come to their ends; their processes may still be there."""
        ended = (self.board.get(slot.rank, Field.ENDED) for slot in self.slots)
        recorded = (self.board.get(slot.rank, Field.RECORDED) for slot in self.slots)
        is_any_lost = self.first_failure.found is not None or any(slot.is_lost for slot in self._known)
        has_ended = all(is_over or at == FINISHED for is_over, at in zip(ended, recorded, strict=True))
        return bool(self.slots) and has_ended and not is_any_lost

    def take_role(self, role: Role) -> None:
        """What this agent is to the others from now on."""
        self.role = role

    def take_job(self, job: recovery.Job) -> None:
        """The group goes on, or begins, with what is known of it by these."""
        self.job = job

    def note_generation(self, generation: int) -> None:
        """The agent that leads, if it is another one, has begun another generation."""
        if self.peers.is_follower:
            self.job = replace(self.job, generation=generation)

    def decide(self, event: Event) -> tuple[Action, ...]:
        """Let the state machine take an event; returns what is to be done."""
        self.job, actions = recovery.advance(self.job, event)
        return actions

    def pause(self) -> None:
        """Nobody decides from now on."""
        self.is_paused = True

    def unpause(self) -> None:
        """What happens is decided on again."""
        self.is_paused = False

    def break_down(self) -> None:
        """The supervisor has failed."""
        self.is_broken = self.is_paused = True
        self.is_settled.set()

    def hear_conclusion(self, verdict: Verdict) -> None:
        """The agent that leads has ended this group."""
        self.is_concluded_elsewhere = True
        self.conclude(verdict)

    def end_by(self, signal: int) -> None:
        """A launcher has got a signal that ends the job."""
        self.ended_by = signal

    def conclude(self, verdict: Verdict) -> None:
        """This group has come to its end; torch's agent asks for the verdict."""
        self.verdict = verdict
        self.is_settled.set()
        code = 1 if self.first_failure.found is None else self.first_failure.found.exit_code
        how = (verdict.kind, verdict.reason, verdict.has_progress, code, self.ended_by, verdict.reason_kind)
        self.peers.conclude(meeting.Concluded(*how))

    def advance(self, event: Event) -> None:
        """This agent leads, and the state machine has to answer this; within a decision it is next."""
        self.role.advance(event)

    @property
    def is_ending(self) -> bool:
        """This agent leads, and the job saves its state and ends: nobody can join it any more."""
        is_over = self.verdict is not None and self.verdict.kind != "done"
        return is_over or bool(self.ended_by) or self.job.phase in _LAST_PHASES

    def watch_peers(self) -> None:
        """Listen to the agents of the other nodes from now on."""
        if self.peers.pool is not None:
            self.peers.pool.is_ending = lambda: self.is_ending
        self.peers.watch(self.selector, self.role.take, self.role.lose, self.role.welcome)

    def log(self, event: str, **fields: object) -> None:
        """Append to the event log; a reason is written as its sentence, with its kind beside it if it has one."""
        reason = fields.get("reason")
        if isinstance(reason, Reason):
            fields |= {"reason": reason.text} | ({"reason_kind": reason.kind} if reason.kind else {})
        with self._log_lock:
            self._events.append(event, **{"at_s": time.monotonic()} | fields)

    def remove_left_files(self, pid: int = 0, limit_s: float = 0.0) -> None:
        """Remove what dead DataLoader workers of this run have left in shared memory.

        pid      of a rank that has just ended, 0 if none has
        limit_s  to wait for those that are about to die
        """
        self._past.add(pid)
        ends_s = time.monotonic() + limit_s
        while True:
            removed, is_more = children.remove_left_files(self.run.path, self._past - {0})
            if removed:
                self.log("left_files_removed", names=removed)
            if not is_more or time.monotonic() >= ends_s:
                return
            time.sleep(_LOOK_AGAIN_S)

    def go_back(self, slot: Process | Row, boundary: int) -> None:
        """What a rank has done beyond a boundary is void; it has no process now."""
        slot.go_back_to(boundary)
        self.board.set(slot.rank, Field.RECORDED, boundary)
        self.board.set(slot.rank, Field.APPLIED, boundary)
        self.board.forget_process(slot.rank)

    def void_beyond(self, boundary: int) -> None:
        """What lost ranks have recorded beyond a boundary is void: survivors wait for their replacements' records."""
        for slot in self._known:
            if slot.void_beyond(boundary):
                self.board.set(slot.rank, Field.RECORDED, boundary)

    # What the ranks have left in shared memory, dead or alive.

    @property
    def has_board(self) -> bool:
        """A group has been begun."""
        return self._board is not None

    @property
    def board(self) -> Board:
        """The page on which the ranks note how far they are; only once a group has been begun."""
        assert self._board is not None
        return self._board

    def board_row(self, slot: Process | Row) -> list[int]:
        """A rank's row of the board, as it is now; `Field` has its columns."""
        return self.board.row(slot.rank).tolist()

    def recorder_of(self, slot: Process) -> Recorder:
        """A rank's records."""
        return Recorder(slot.record_fd, self._slot_bytes)

    def copies_in(self, slot: Process) -> Recorder:
        """The records of a rank of another node, as far as this one keeps a copy."""
        return Recorder(slot.copies_fd, self._slot_bytes)

    def new_recorder(self, slot: Process) -> Recorder:
        """Void a rank's records, and give it room for others."""
        slot.renew_records(self._slot_bytes)
        return self.recorder_of(slot)

    def recorded(self, slot: Process, boundary: int) -> Outline | None:
        """Of a rank's record of a boundary, whoever wrote it; None if there is none."""
        record = self.recorder_of(slot).read(boundary)
        return None if record is None else read_outline(record[0])

    @property
    def _slot_bytes(self) -> int:
        return self.config.record_limit_mib << 20

    def move_master(self, where: str) -> None:
        """Processes that are started from now on find their store elsewhere: "address port"."""
        self.peers.master = where
        address, port = where.split()
        for slot in self.here:
            slot.handler.start["env"] |= {"MASTER_ADDR": address, "MASTER_PORT": port}


logger = logging.getLogger("ttprun")


def note_failure(node: Node, failure: Failure | RankExited) -> None:
    """A rank has failed: the root cause of what the group suffers, if nothing has before it."""
    if isinstance(failure, RankExited):
        failure = Failure(failure.rank, failure.pid, failure.exit_code, failure.reason, failure.traceback)
    node.first_failure.note(failure, is_new_incident=node.job.incident is None)


def note_script_error(node: Node, slot: Row, message: ScriptError) -> None:
    """An exception ends a script; before the first step its traceback is printed here, once."""
    if message.traceback and not any(other.script_error for other in node.slots):
        with contextlib.suppress(OSError):  # whoever read it has gone
            os.write(2, message.traceback.encode(errors="backslashreplace"))
    slot.note_error(message.error)
    node.log("script_error", rank=slot.rank, error=message.error, traceback=message.detail)


def log_exit(node: Node, event: RankExited, where: Mapping[str, int]) -> None:
    """A rank's process has ended; `where`: {"node": number} if that is on another node."""
    fields = {"code": event.code, "signal": event.signal, "boundary": event.boundary, "reason": event.reason}
    node.log("rank_exited", rank=event.rank, pid=event.pid, **where, **fields, at_s=event.at_s)


def report_mismatch(node: Node, rank: int, generation: int, reason: Reason) -> None:
    """A rank is not what it should be: it cannot be repaired in this way.

    rank         global
    generation   in which that was found; of an older one it counts no more
    reason       which check has failed, and the two values
    """
    node.report(MismatchFound(at_s=time.monotonic(), rank=rank, generation=generation, reason=reason))


def refuse_stored(node: Node, rank: int, generation: int, error: Exception) -> None:
    """What a rank is to go back to cannot be used."""
    report_mismatch(
        node, rank, generation, Reason("stored-state-unusable", f"its stored state cannot be used: {error}")
    )


def refuse(node: Node, rank: int, reason: str) -> None:
    """A rank has sent what is no message, which has no effect: what should have come instead has its deadline."""
    node.log("message_refused", rank=rank, reason=reason)
    logger.warning("a message of rank %d is ignored: %s", rank, reason)


def give_up(node: Node, reason: str, kind: str = "fail", is_new_incident: bool = True) -> None:
    """This node's ranks end, for a reason that lies with none of them.

    kind   of the verdict
    """
    failure = Failure(node.here[0].rank, 0, -signal.SIGTERM, reason)
    node.first_failure.note(failure, is_new_incident)
    node.conclude(Verdict(kind, reason))
