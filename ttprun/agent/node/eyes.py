"""What can be seen of the ranks of this node, and their stacks: when somebody asks, and when a rank hangs.

Each rank writes its own stack (`ttprun.rank.heartbeat`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ttprun.agent.base import life_signs, stack_dumps
from ttprun.agent.node.node import Node
from ttprun.agent.node.process import Process
from ttprun.agent.node.rank_processes import command_of
from ttprun.agent.node.state_copies import Memory
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import replace_file
from ttprun.observe.stacks import RankStack, StackReport
from ttprun.protocol.board import OPERATION_NAMES, Field, Phase


@dataclass(frozen=True)
class Target:
    """A rank whose stack is taken, and what the board says of it at that moment.

    writer        its process
    main_thread   ident of its main thread
    row           by board.Field
    """

    rank: int
    pid: int
    writer: stack_dumps.Writer
    main_thread: int
    row: Sequence[int]

    @classmethod
    def of(cls, node: Node, slot: Process) -> Target:
        """That of a rank slot."""
        writer = stack_dumps.Writer(slot.pid, slot.stack_fd, node.board, slot.rank)
        return cls(slot.rank, slot.pid, writer, slot.main_thread, node.board_row(slot.rank))

    def stack(self, text: str) -> RankStack:
        """What is reported of it.

        text   stacks of all its threads, "" if they were not had
        """
        return RankStack(
            rank=self.rank,
            pid=self.pid,
            step=self.row[Field.APPLIED],
            doing=Phase(self.row[Field.PHASE]).name.lower(),
            operation=OPERATION_NAMES[self.row[Field.OPERATION]],
            main=stack_dumps.of_the_user(stack_dumps.main_thread_of(text, self.main_thread)),
            all_threads=text,
        )


class NodeEyes:
    """What of this node is seen without a message, by what is decided in the same agent (`lead.py`)."""

    def __init__(self, node: Node, memory: Memory) -> None:
        self._node = node
        self.newest, self.stored, self.own_part = memory.newest, memory.stored, memory.own_part

    def command(self) -> list[str]:
        """The script of the ranks, and its arguments."""
        return command_of(self._node.here[0].handler.start)

    def state_of(self, rank: int) -> tuple[str, float]:
        """State letter of the process of a rank, and its processor time; ("", 0.0) if there is none."""
        slot = self._node.process(rank)
        with contextlib.suppress(OSError, ValueError, IndexError):
            if slot.pid and not slot.is_buried:
                return life_signs.state_of(slot.pid)
        return "", 0.0

    def take_all(self, without: int | None = None) -> Callable[[], tuple[RankStack, ...]]:
        """A function that takes the stacks of this node's living ranks; it blocks, two seconds at most.

        without   a rank that is left out: it may not answer

        To be called on the supervisor's thread; what it returns is for another one.
        """
        slots = [slot for slot in self._node.here if slot.is_present and not slot.is_lost and not slot.is_finished]
        targets = [Target.of(self._node, slot) for slot in slots if slot.rank != without]

        def take() -> tuple[RankStack, ...]:
            texts = stack_dumps.ask_all([target.writer for target in targets])
            return tuple(target.stack(text) for target, text in zip(targets, texts, strict=True))

        return take

    def take_stack(self, rank: int, is_stopped: bool) -> Callable[[], RankStack]:
        """A function that takes the stack of one rank, which may hang; it blocks some seconds at most."""
        target = Target.of(self._node, self._node.process(rank))
        return lambda: target.stack(stack_dumps.take(target.writer, is_stopped))

    def end_at_once(self, rank: int) -> None:
        """Kill the process of a rank, and wait until it does nothing more."""
        slot = self._node.process(rank)
        slot.kill()
        life_signs.let_stop(slot.pid)

    def write_when_taken(self, number: int) -> None:
        """Have the stacks taken and written to the run's `stacks.json`, as report `number`; returns at once."""
        node, at, take = self._node, timestamp(), self.take_all()

        def work() -> str:
            try:
                replace_file(node.run.stacks, StackReport(number, at, take()).to_json())
            except OSError as error:
                return error.strerror or str(error)
            return ""

        def then(why_not: str) -> None:
            if why_not:
                node.log("stacks_not_written", error=why_not)

        node.in_background(work, then, partial(node.domains.note, "stacks"))
