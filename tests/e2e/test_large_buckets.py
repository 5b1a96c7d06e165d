"""Gradients that the journal does not copy: what an all-reduce held comes from `.grad`, or from who has the result."""

from __future__ import annotations

import pytest

from tests.e2e.harness import (
    RunTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

LARGE = "large_buckets.py"


@pytest.mark.parametrize(
    ("ranks", "rank", "phase"),
    [
        (2, 0, "forward"),
        (2, 0, "before_step"),
        (2, 0, "after_step"),
        (3, 2, "backward"),
        (3, 2, "collective"),
        (3, 2, "in_step"),
    ],
)
def test_a_rank_killed_in_any_phase_is_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, ranks: int, rank: int, phase: str
) -> None:
    """Twice: for the second time the first one's replacement still makes copies."""
    faults = [f"kill:rank={rank},step=11,phase={phase}", f"kill:rank={(rank + 1) % ranks},step=13,phase=backward"]

    result = run_ttprun(LARGE, ranks, faults=faults)

    assert_only_replaced(result, incidents=2)
    assert_same_outcome(result, undisturbed(LARGE, ranks))
    assert_survivors_kept_their_pids(result)


@pytest.mark.parametrize("phase", ["backward", "before_step", "in_step"])
def test_a_rank_killed_after_steps_that_a_gradient_scaler_left_out_is_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str
) -> None:
    """Boundary 10 is the newest one in iterations 10 to 12; the buckets have been reduced anew in each."""
    arguments = ["--overflows", "10,11"]

    result = run_ttprun(LARGE, 2, faults=[f"kill:rank=1,step=10,phase={phase}"], script_args=arguments)

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(LARGE, 2, arguments))
    assert_survivors_kept_their_pids(result)
