"""What the coordinator's orders are made of, and how a group ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agent.nodes import node_of, part
from ttprun.agent.lead.conduct import Coordinator
from ttprun.protocol.reason import Reason
from ttprun.recovery import FailJob, FinishJob, RestartGroup


@pytest.mark.parametrize(
    ("orders", "verdict"),
    [
        (
            (RestartGroup(Reason(text="a rank is lost")), FailJob(Reason(text="a gradient is NaN"), False)),
            ("fail", "a gradient is NaN", False),
        ),
        (
            (FailJob(Reason(text="a gradient is NaN"), False), RestartGroup(Reason(text="a rank is lost"))),
            ("fail", "a gradient is NaN", False),
        ),
        ((FailJob(Reason(text="first"), True), FailJob(Reason(text="second"), False)), ("fail", "first", True)),
        ((FinishJob(), FailJob(Reason(text="too late"), True)), ("done", "", True)),
    ],
    ids=["a restart that has not begun", "an end", "two ends", "all have finished"],
)
def test_only_the_end_of_the_job_overrules_a_verdict_and_only_a_restart(
    tmp_path: Path, orders: tuple[Any, ...], verdict: tuple[str, str, bool]
) -> None:
    node = node_of(tmp_path)

    for order in orders:
        part(Coordinator, node).carry_out(order)

    assert node.verdict is not None
    assert (node.verdict.kind, node.verdict.reason, node.verdict.has_progress) == verdict
