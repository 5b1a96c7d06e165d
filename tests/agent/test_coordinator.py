"""What the coordinator's orders are made of, and how a group ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.agent.nodes import node_of, part
from ttprun.agent.core.coordinator import Coordinator
from ttprun.agent.launcher.verdict import Verdict
from ttprun.protocol.board import Field
from ttprun.recovery import FailJob, FinishJob, RestartGroup


@pytest.mark.parametrize(
    ("boundary", "lines"),
    [(6, (4, 1)), (7, (1, 0)), (8, (0, 0))],
    ids=["before the newest", "the newest that all have", "recorded, and not announced when it was killed"],
)
def test_lines_that_a_rank_has_written_since_a_boundary_are_known_whenever_it_was_killed(
    tmp_path: Path, boundary: int, lines: tuple[int, int]
) -> None:
    node = node_of(tmp_path, record_limit_mib=1)
    node.begin_group([(0, 0)])
    (slot,), board = node.slots, node.board
    for number, said in {6: [10, 2], 7: [13, 3], 8: [14, 3]}.items():
        node.recorder_of(slot).write(number, msgpack.packb({"lines": said}), [])
    board.set(0, Field.RECORDED, 7)
    board.set(0, Field.LINES_OUT, 14)
    board.set(0, Field.LINES_ERR, 3)

    assert node.lines_since(slot, boundary) == lines


def test_before_the_first_step_all_its_lines_are_since_then(tmp_path: Path) -> None:
    node = node_of(tmp_path, record_limit_mib=1)
    node.begin_group([(0, 0)])
    (slot,), board = node.slots, node.board
    board.set(0, Field.LINES_OUT, 5)

    assert node.lines_since(slot, 0) == (5, 0)


@pytest.mark.parametrize(
    ("orders", "verdict"),
    [
        ((RestartGroup("a rank is lost"), FailJob("a gradient is NaN", False)), ("fail", "a gradient is NaN", False)),
        ((FailJob("a gradient is NaN", False), RestartGroup("a rank is lost")), ("fail", "a gradient is NaN", False)),
        ((FailJob("first", True), FailJob("second", False)), ("fail", "first", True)),
        ((FinishJob(), FailJob("too late", True)), ("done", "", True)),
    ],
    ids=["a restart that has not begun", "an end", "two ends", "all have finished"],
)
def test_only_the_end_of_the_job_overrules_a_verdict_and_only_a_restart(
    tmp_path: Path, orders: tuple[Any, ...], verdict: tuple[str, str, bool]
) -> None:
    node = node_of(tmp_path)

    for order in orders:
        part(Coordinator, node).carry_out(order)

    assert node.verdict == Verdict(*verdict)
