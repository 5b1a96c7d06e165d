"""What the agent's orders are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from ttprun.agent.orders import Orders
from ttprun.agent.seat import Seat
from ttprun.agent.verdict import Verdict
from ttprun.protocol.board import Board, Field
from ttprun.rank.records.recorder import Recorder
from ttprun.recovery import FailJob, FinishJob, RestartGroup

SLOT_BYTES = 1 << 20


@pytest.mark.parametrize(
    ("boundary", "lines"),
    [(6, (4, 1)), (7, (1, 0)), (8, (0, 0))],
    ids=["before the newest", "the newest that all have", "recorded, and not announced when it was killed"],
)
def test_lines_that_a_rank_has_written_since_a_boundary_are_known_whenever_it_was_killed(
    boundary: int, lines: tuple[int, int]
) -> None:
    seat = Seat(0, 0, handler=None, record_fd=Recorder.create(SLOT_BYTES))  # type: ignore[arg-type]
    for number, said in {6: [10, 2], 7: [13, 3], 8: [14, 3]}.items():
        Recorder(seat.record_fd, SLOT_BYTES).write(number, msgpack.packb({"lines": said}), [])
    board = Board.create(1)[1]
    board.set(0, Field.RECORDED, 7)
    board.set(0, Field.LINES_OUT, 14)
    board.set(0, Field.LINES_ERR, 3)
    supervisor: Any = SimpleNamespace(board=board, config=SimpleNamespace(record_limit_mib=1))

    assert Orders(supervisor).lines_since(seat, boundary) == lines


def test_before_the_first_step_all_its_lines_are_since_then() -> None:
    seat = Seat(0, 0, handler=None, record_fd=Recorder.create(SLOT_BYTES))  # type: ignore[arg-type]
    board = Board.create(1)[1]
    board.set(0, Field.LINES_OUT, 5)
    supervisor: Any = SimpleNamespace(board=board, config=SimpleNamespace(record_limit_mib=1))

    assert Orders(supervisor).lines_since(seat, 0) == (5, 0)


class FakeSupervisor:
    """Keeps the verdict on its group of ranks."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None

    def log(self, event: str, **fields: object) -> None: ...

    def conclude(self, verdict: Verdict) -> None:
        self.verdict = verdict


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
    orders: tuple[Any, ...], verdict: tuple[str, str, bool]
) -> None:
    supervisor: Any = FakeSupervisor()

    for order in orders:
        Orders(supervisor).carry_out(order)

    assert supervisor.verdict == Verdict(*verdict)
