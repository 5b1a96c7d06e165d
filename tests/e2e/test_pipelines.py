"""Pipelines: the ranks of a stage replace each other, and what was sent and received is neither lost nor doubled."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

BY_HAND = "pipeline_by_hand.py"  # 16 steps


@pytest.mark.parametrize(
    ("how", "rank", "step", "phase"),
    [
        ("blocking", 1, 9, "backward"),
        ("blocking", 0, 5, "collective"),
        ("async", 2, 7, "collective"),
        ("async", 3, 4, "forward"),
        ("batched", 1, 6, "collective"),
        ("batched", 0, 12, "in_step"),
        ("sized", 3, 8, "collective"),
        ("sized", 0, 1, "forward"),
        ("blocking", 2, 0, "forward"),
        ("async", 1, 15, "after_step"),
    ],
)
def test_a_rank_of_a_pipeline_is_replaced_from_its_stage_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, how: str, rank: int, step: int, phase: str
) -> None:
    arguments = ["--how", how]

    run = run_ttprun(BY_HAND, 4, script_args=arguments, faults=[f"kill:rank={rank},step={step},phase={phase}"])

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed(BY_HAND, 4, arguments))


SCHEDULES = "pipeline_schedules.py"  # 12 steps
THREE_DIMENSIONS = [(5, 3, "collective"), (0, 5, "backward"), (6, 8, "forward")]


@pytest.mark.parametrize(
    ("arguments", "rank", "step", "phase"),
    [
        (["--schedule", "1f1b"], 1, 5, "collective"),
        (["--schedule", "1f1b"], 2, 7, "backward"),
        (["--schedule", "gpipe"], 3, 4, "forward"),
        (["--schedule", "interleaved"], 0, 6, "collective"),
        (["--schedule", "interleaved"], 3, 4, "forward"),
        (["--schedule", "1f1b", "--ddp"], 1, 6, "backward"),
        (["--schedule", "1f1b"], 0, 0, "forward"),
    ],
)
def test_a_rank_in_a_schedule_of_torch_s_own_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, arguments: list[str], rank: int, step: int, phase: str
) -> None:
    run = run_ttprun(SCHEDULES, 4, script_args=arguments, faults=[f"kill:rank={rank},step={step},phase={phase}"])

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed(SCHEDULES, 4, arguments))


def test_in_three_dimensions_several_ranks_are_replaced_one_after_the_other_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    arguments = ["--tp", "2"]
    kills = [f"kill:rank={rank},step={step},phase={phase}" for rank, step, phase in THREE_DIMENSIONS]

    run = run_ttprun(SCHEDULES, 8, script_args=arguments, faults=kills)

    assert_only_replaced(run, incidents=len(kills))
    assert_same_outcome(run, undisturbed(SCHEDULES, 8, arguments))
