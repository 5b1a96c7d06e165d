"""A seat: the place of one rank in the job, whichever process sits there.

Its recorder outlives the process, so that a replacement can read what the lost rank has left.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from ttprun.agent.processes import RankHandler
from ttprun.board import Board, Field
from ttprun.channel import Message
from ttprun.recovery.events import RankExited

KILLED_FOR_MEMORY = 137


@dataclass
class Seat:
    """One rank of this node.

    record_fd       memfd of its recorder
    is_present      the process has greeted: it can be told things
    held            an order that waits for the greeting; a newer one takes its place
    held_puts       what other ranks have told all meanwhile
    lost_lines      lines of stdout and stderr that the lost process had written since boundary 0 or its newest record
    """

    rank: int
    local_rank: int
    handler: RankHandler
    record_fd: int
    pid: int = 0
    pidfd: int = -1
    is_present: bool = False
    is_protected: bool = False
    is_finished: bool = False
    is_lost: bool = False
    held: Message | None = None
    held_puts: list[Message] = field(default_factory=list)
    script_error: str = ""
    journal: dict[str, Any] = field(default_factory=dict)
    lost_lines: tuple[int, int] = (0, 0)
    lost_boundary: int = 0

    def sit(self, handler: RankHandler) -> None:
        """A process has been started for this rank."""
        self.handler = handler
        self.pid = handler.proc.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.is_present = self.is_protected = self.is_finished = self.is_lost = False
        self.held = None
        self.held_puts = []
        self.script_error = ""
        self.journal = {}

    def tell(self, message: Message) -> None:
        """Send to the process, or hold the message till it has greeted."""
        if self.is_present:
            self.handler.channel.send(message)
        else:
            self.held = message

    def pass_on(self, put: Message) -> None:
        """Pass on what another rank tells all."""
        if self.is_present:
            self.handler.channel.send(put)
        elif not self.is_lost and not self.is_finished:
            self.held_puts.append(put)

    def greet(self) -> None:
        """The process has greeted."""
        self.is_present = True
        if self.held is not None:
            self.handler.channel.send(self.held)
            self.held = None
        for put in self.held_puts:
            self.handler.channel.send(put)
        self.held_puts = []

    def leave(self, board: Board, died_at_s: float | None) -> RankExited:
        """The process has ended: note what it leaves, and say how it ended."""
        code = self.handler.proc.wait()
        os.close(self.pidfd)
        self.pidfd = -1
        self.is_present = False
        self.is_finished = code == 0
        self.is_lost = not self.is_finished
        self.lost_boundary = board.get(self.local_rank, Field.RECORDED)
        self.lost_lines = (
            board.get(self.local_rank, Field.LINES_OUT),
            board.get(self.local_rank, Field.LINES_ERR),
        )
        if self.is_lost:
            board.set(self.local_rank, Field.LEAVING, 0)
        now = time.monotonic()
        return RankExited(
            at_s=now,
            rank=self.rank,
            pid=self.pid,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            boundary=self.lost_boundary,
            detected_after_s=0.0 if died_at_s is None else max(0.0, now - died_at_s),
            is_script_error=bool(self.script_error) or (code > 0 and not self.is_protected),
            reason=self.script_error,
        )
