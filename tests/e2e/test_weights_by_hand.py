"""A script may change weights itself, between steps: whoever is repaired gets those that the step has left."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "weights_by_hand.py"
KILLS = [
    # manner, step, phase
    ("swap", 11, "validation"),  # while the averaged weights stand in the place of the trained ones
    ("swap", 11, "before_step"),
    ("decay", 10, "backward"),
    ("decay", 10, "after_step"),
    ("data", 10, "collective"),
    ("data", 17, "before_step"),
]


@pytest.mark.parametrize(("manner", "step", "phase"), KILLS)
def test_a_rank_that_is_replaced_behind_a_change_by_hand_is_as_the_others(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, manner: str, step: int, phase: str
) -> None:
    args = ["--manner", manner]
    run = run_ttprun(SCRIPT, 2, faults=[f"kill:rank=1,step={step},phase={phase}"], script_args=args)

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed(SCRIPT, 2, args))
