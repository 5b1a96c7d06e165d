"""A node and its processes: each the place of one rank, whichever operating system's process is that rank now.

Its recorder outlives the process, so that a replacement can read what the lost rank has left. What is decided of the
rank, and knows no process, has a row of it (`rows.py`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttprun.agent.base import life_signs, stack_dumps
from ttprun.agent.base.ground import Ground, Slot
from ttprun.agent.node.rank_processes import RankHandler, kill_session
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import children
from ttprun.protocol import from_rank
from ttprun.protocol.board import Board, Field
from ttprun.protocol.channel import Order
from ttprun.protocol.rank_events import RankExited

_LOOK_AGAIN_S = 0.05


@dataclass
class Process(Slot):
    """One rank of this node.

    handler         a RankHandler
    record_fd       memfd of its recorder
    copies_fd       memfd of the recorder in which it keeps the records of a rank of another node; -1: on one node
    stack_fd        memfd into which it writes its Python stack when it is asked, or crashes
    is_dying        its process is lost, and not gone yet
    killed_at_s     when its process was killed because it had to be replaced; infinite if it has ended by itself
    is_buried       its process is gone, and what it had started is killed: the kernel may reuse its pid
    is_spawn_due    it gets its next process once that need not wait for anything more
    had_to_wait     no standby was ready for it: it waits, or has waited, for one that is being prepared
    had_torch       this process or one before it in this slot had imported torch
    import_s        from the start of its first process to the end of that import; a standby has done it already
    hung_up_at_s    when its end of the line was closed, as by the end of the process, or by another program that has
                    taken its place; None: it is open
    began_at_s      when this process was started
    held            an order that waits for the greeting; a newer one takes its place
    device_fault    what has happened to its device, if that has ended its script
    """

    handler: Any
    record_fd: int
    stack_fd: int = -1
    pidfd: int = -1
    had_torch: bool = False
    began_at_s: float = 0.0
    import_s: float = 0.0
    hung_up_at_s: float | None = None
    is_dying: bool = False
    killed_at_s: float = math.inf
    is_buried: bool = False
    is_spawn_due: bool = False
    had_to_wait: bool = False
    held: Order | None = None
    device_fault: str = ""
    traceback: str = ""
    frame: str = ""
    copies_fd: int = -1

    @classmethod
    def create(cls, rank: int, local_rank: int, record_bytes: int, keeps_copies: bool) -> Process:
        """Of a rank of this node; `keeps_copies`: of the records of a rank of another node, too."""
        copies_fd = Recorder.create(record_bytes) if keeps_copies else -1
        return cls(rank, local_rank, None, Recorder.create(record_bytes), stack_dumps.create(), copies_fd=copies_fd)

    def close(self) -> None:
        """Give back what it has for its records and stacks."""
        for fd in (self.record_fd, self.stack_fd, self.copies_fd):
            if fd >= 0:
                os.close(fd)

    def assign(self, handler: RankHandler) -> None:
        """A process has been started for this rank."""
        self.handler = handler
        self.pidfd = os.pidfd_open(handler.proc.pid)
        self.begin_process(handler.proc.pid)

    def begin_process(self, pid: int) -> None:
        """Nothing is known of a new process yet."""
        self.pid = pid
        self.began_at_s = time.monotonic()
        self.is_present = self.is_protected = self.is_finished = self.is_lost = self.is_dying = self.is_buried = False
        self.hung_up_at_s = None
        self.killed_at_s = math.inf
        self.is_spawn_due = False
        self.held = None
        self.script_error = self.device_fault = self.traceback = self.frame = ""
        self.main_thread = 0

    def send(self, message: Order) -> None:
        """Send to the process, or hold the message till it has greeted."""
        if self.is_present:
            self.handler.channel.send(message)
        else:
            self.held = message

    def send_if_present(self, put: Order) -> None:
        """Send what another rank reports to all, if there is a process that has greeted."""
        if self.is_present:
            self.handler.channel.send(put)

    def greet(self, main_thread: int) -> None:
        """The process has greeted."""
        self.main_thread = main_thread
        self.is_present = True
        if self.held is not None:
            self.handler.channel.send(self.held)
            self.held = None

    def protect(self) -> None:
        """The hooks of its process have been heard."""
        if not self.had_torch:
            self.import_s = time.monotonic() - self.began_at_s
        self.is_protected = self.had_torch = True

    def note_error(self, error: from_rank.ScriptError) -> None:
        """An exception ends its script; a traceback that is printed at once is not kept."""
        self.script_error, self.device_fault = error.error, error.device_fault
        self.traceback = "" if error.traceback else error.detail

    def kill(self) -> None:
        """SIGKILL to the process and all that it has started; a signal handler may call it at any moment."""
        if not self.is_buried:
            kill_session(self.pid)

    def bury(self) -> int:
        """The process is gone, or will be; returns its exit code, or minus the signal that ended it."""
        code: int = self.handler.proc.wait()
        self.forget_process()
        self.is_buried = True
        return code

    def forget_process(self) -> None:
        """Nobody waits any longer for its end."""
        self.is_dying = False
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def let_die(self) -> None:
        """Its process is killed, or will be at once: the rank is lost."""
        self.is_lost, self.is_dying = True, self.pidfd >= 0
        self.is_spawn_due = False
        self.killed_at_s = time.monotonic()

    def defer_spawn(self, waits_for_standby: bool) -> bool:
        """Whether its next process has to wait, for a standby or for the end of this one; it is due from then on."""
        self.is_spawn_due = self.is_dying or waits_for_standby
        self.had_to_wait = self.had_to_wait or waits_for_standby
        return self.is_spawn_due

    def leave(self, code: int, board: Board, cause_of_signal: Callable[[int, int], str]) -> RankExited:
        """The process runs no more: note what it leaves, and say how it ended.

        code              its exit code, or minus the signal that ended it
        cause_of_signal   given the signal and the pid, says why; "" if it does not know
        """
        of_signal = cause_of_signal(-code, self.pid) if code < 0 else None
        reason = self._cause(of_signal)
        if code < 0 and board.get(self.rank, Field.ENDED):
            code, reason = 0, f"signal {-code} after the end of its script, so nothing is lost"
        self.is_finished = code == 0
        self.is_lost = not self.is_finished
        self.note_leavings(board)
        return RankExited.ended(
            code,
            at_s=time.monotonic(),
            rank=self.rank,
            pid=self.pid,
            boundary=self.lost_boundary,
            is_script_error=not self.device_fault and (bool(self.script_error) or (code > 0 and not self.is_protected)),
            device_fault=self.device_fault,
            reason=reason,
            crashed_at=reason if -code in life_signs.CRASHES and self.frame else "",
        )

    def note_leavings(self, board: Board) -> None:
        """The process is gone: keep what its replacement needs, and clear its signs of life."""
        self.is_present = False
        self.lost_boundary = board.get(self.rank, Field.RECORDED)
        if self.is_lost:
            board.forget_process(self.rank)

    def _cause(self, of_signal: str | None) -> str:
        """Root cause in a phrase: the script's exception, or what the system says, and where it stood."""
        if self.script_error:
            return self.script_error
        stack = "" if of_signal is None else stack_dumps.left_behind(self.stack_fd)
        crashed, main = stack_dumps.current_thread_of(stack), stack_dumps.main_thread_of(stack, self.main_thread)
        self.frame = stack_dumps.innermost_user_frame(crashed) or stack_dumps.innermost_user_frame(main)
        own = stack_dumps.of_the_user(crashed)
        self.traceback = f"The script, most recent call first:\n{own}\n\n{stack}" if own else stack
        return ", in ".join(filter(None, (of_signal, self.frame)))


class Node(Ground):
    """What this machine does for its ranks, whichever agent leads.

    here       the processes of this node's ranks, by local rank
    loops      files in which earlier runs have met a training loop; None: on several nodes they may differ
    board_fd   of the board; -1 before the first group
    """

    here: list[Process]
    loops: list[str] | None
    board_fd: int
    _past: set[int]  # pids of ranks that have ended

    def process(self, rank: int) -> Process:
        """That of a rank of this node. Raises LookupError if the rank is on another one."""
        if not self.is_here(rank):
            raise LookupError(f"rank {rank} is on {self.peers.name_of(self.peers.node_of(rank))}")
        return self.here[rank - self.here[0].rank]

    def note_generation(self, generation: int) -> None:
        """The agent that leads, if it is another one, has begun another generation."""
        if self.peers.is_follower:
            self.generation = generation

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

    def move_master(self, where: str) -> None:
        """Processes that are started from now on find their store elsewhere: "address port"."""
        self.peers.master = where
        address, port = where.split()
        for slot in self.here:
            slot.handler.start["env"] |= {"MASTER_ADDR": address, "MASTER_PORT": port}

    # What the ranks have left in shared memory, dead or alive.

    def recorder_of(self, slot: Process) -> Recorder:
        """A rank's records."""
        return Recorder(slot.record_fd, self.slot_bytes)

    def new_recorder(self, slot: Process) -> Recorder:
        """Void a rank's records, and give it room for others."""
        os.close(slot.record_fd)
        slot.record_fd = Recorder.create(self.slot_bytes)
        return self.recorder_of(slot)

    @property
    def slot_bytes(self) -> int:
        """Room for the records of one rank."""
        return self.config.record_limit_mib << 20
