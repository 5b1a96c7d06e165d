"""Trainings one after the other in a loop of a library: each is protected like the first."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

OWN_LOOP = "sweep_own.py"  # 2 trainings of 12 steps
SCRIPT = "sweep.py"  # 3 trainings of 12 steps
BY_PASS = "sweep_by_pass.py"  # 5 trainings of 8 steps, the second and the fourth end after 5


@pytest.mark.parametrize(
    "kill",
    [
        "kill:rank=1,step=6,phase=backward",
        "kill:rank=1,step=13,phase=backward",  # the second training has taken one step
        "kill:rank=0,step=31,phase=in_step",
    ],
)
def test_a_rank_that_is_lost_in_any_training_of_a_librarys_sweep_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, kill: str
) -> None:
    result = run_ttprun(SCRIPT, 2, faults=[kill])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(SCRIPT, 2))


def test_a_rank_that_is_lost_in_the_second_training_of_a_scripts_own_sweep_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    """Its replay passes over the first training, and so over the groups that this has made and destroyed."""
    result = run_ttprun(OWN_LOOP, 2, faults=["kill:rank=1,step=17,phase=backward", "kill:rank=0,step=20,phase=forward"])

    assert_only_replaced(result, incidents=2)
    assert_same_outcome(result, undisturbed(OWN_LOOP, 2))


@pytest.mark.parametrize("form", ["counted", "while", "drawn", "for"])
def test_a_rank_that_is_lost_in_a_later_trial_is_replaced_with_the_model_and_optimizer_of_that_trial(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, form: str
) -> None:
    """Step 14 is the first after a pruned trial, 17 in its middle."""
    kills = ["kill:rank=1,step=14,phase=backward", "kill:rank=0,step=17,phase=backward"]

    result = run_ttprun(BY_PASS, 2, faults=kills, script_args=[form])

    assert_only_replaced(result, incidents=2)
    assert_same_outcome(result, undisturbed(BY_PASS, 2, [form]))
