"""Pipelines: the ranks of a stage replace each other, and what was sent and received is neither lost nor doubled."""

from __future__ import annotations

import pytest

from tests.e2e.cases import recovered_and_undisturbed
from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

SCHEDULES = "pipeline_schedules.py"  # 12 steps


@pytest.mark.parametrize(
    "case",
    [
        "--schedule 1F1B: kill:rank=1,step=5,phase=collective",
        "--schedule GPipe: kill:rank=3,step=4,phase=forward",
        "--schedule LoopedBFS: kill:rank=2,step=5,phase=backward",
        "--schedule ZBVZeroBubble: kill:rank=1,step=5,phase=collective",
        "--schedule InterleavedZeroBubble: kill:rank=0,step=6,phase=collective",
        "--schedule DualPipeV: kill:rank=3,step=6,phase=collective",
        "--rich --workers 1: kill:rank=0,step=7,phase=forward",
    ],
)
def test_a_rank_in_a_schedule_of_torch_s_own_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_same_outcome(*recovered_and_undisturbed(run_ttprun, undisturbed, SCHEDULES, case, ranks=4))


@pytest.mark.parametrize(
    ("case", "rung", "options"),
    [
        ("--fsdp: kill:rank=1,step=6,phase=collective", "replace", ()),
    ],
)
def test_what_else_befalls_a_pipeline_is_repaired_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str, rung: str, options: tuple[str, ...]
) -> None:
    assert_same_outcome(*recovered_and_undisturbed(run_ttprun, undisturbed, SCHEDULES, case, rung, options, ranks=4))


def test_in_three_dimensions_several_ranks_are_replaced_one_after_the_other_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    case = (
        "--tp 2: kill:rank=5,step=3,phase=collective kill:rank=0,step=5,phase=backward kill:rank=6,step=8,phase=forward"
    )

    assert_same_outcome(*recovered_and_undisturbed(run_ttprun, undisturbed, SCHEDULES, case, ranks=8))
