"""The stacks of all ranks of this node: when somebody asks, and when a rank hangs. Nobody is stopped for it.

Each rank writes its own stack (`ttprun.rank.heartbeat`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ttprun.agent.node import stack_dumps
from ttprun.agent.node.node import Node
from ttprun.agent.node.process import Process
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import replace_file
from ttprun.observe.stacks import RankStack, StackReport
from ttprun.protocol.board import OPERATION_NAMES, Field, Phase

_FLIGHT_RECORDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_RECORDS = "/tmp/nccl_trace_rank_"  # the default of torch


def take_all(node: Node, without: int | None = None) -> Callable[[], tuple[RankStack, ...]]:
    """A function that takes the stacks of this node's living ranks; it blocks, two seconds at most.

    without   a rank that is left out: it may not answer

    To be called on the supervisor's thread; what it returns is for another one.
    """
    slots = [slot for slot in node.here if slot.is_present and not slot.is_lost and not slot.is_finished]
    targets = [Target.of(node, slot) for slot in slots if slot.rank != without]

    def take() -> tuple[RankStack, ...]:
        texts = stack_dumps.ask_all([target.writer for target in targets])
        return tuple(target.stack(text) for target, text in zip(targets, texts, strict=True))

    return take


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
        return cls(slot.rank, slot.pid, writer, slot.main_thread, node.board_row(slot))

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


def write_when_taken(node: Node, number: int) -> None:
    """Have the stacks taken and written to the run's `stacks.json`, as report `number`; returns at once."""
    at, take = timestamp(), take_all(node)

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


def flight_records(ranks: list[int], since_s: float) -> list[str]:
    """Files of NCCL's flight recorder that were written since then. They are pickled: nothing here reads them.

    since_s   Unix time
    """
    prefix = next((os.environ[name] for name in _FLIGHT_RECORDER if name in os.environ), _FLIGHT_RECORDS)
    return [
        str(path)
        for path in (Path(f"{prefix}{rank}") for rank in ranks)
        if path.is_file() and path.stat().st_mtime >= since_s
    ]
