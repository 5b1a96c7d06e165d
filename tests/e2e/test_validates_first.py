"""A validation before the training: its loader is not the one over which the lost rank has iterated last."""

from __future__ import annotations

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

VALIDATES_FIRST = "validates_first.py"  # 12 steps, 4 an epoch


def test_a_loader_made_beside_the_lost_ranks_begins_at_its_own_first_batch(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults = ["kill:rank=1,step=3,phase=backward", "kill:rank=0,step=7,phase=backward"]

    result = run_ttprun(VALIDATES_FIRST, 2, faults=faults)

    assert_only_replaced(result, incidents=2)
    assert_same_outcome(result, undisturbed(VALIDATES_FIRST, 2))
