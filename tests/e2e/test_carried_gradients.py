"""A backward that adds to gradients that a step has used, or a log of them: a replacement has them.

In carried_gradients.py the boundaries of a GAN lie after each of its two steps, the discriminator's first.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "carried_gradients.py"
CASES = [
    ("gan", "kill:rank=1,step=9,phase=forward"),  # in the generator's pass, which adds to the discriminator's
    ("gan", "kill:rank=0,step=11,phase=backward"),
    ("gan", "kill:rank=1,step=12,phase=backward"),  # in the discriminator's
    ("gan", "kill:rank=0,step=13,phase=in_step"),
    ("never", "kill:rank=1,step=5,phase=backward"),
    ("never", "kill:rank=0,step=6,phase=forward"),
    ("never", "kill:rank=1,step=7,phase=in_step"),
    ("sharded", "kill:rank=1,step=6,phase=backward"),
    ("sharded", "kill:rank=0,step=7,phase=in_step"),
    ("by-hand", "kill:rank=1,step=6,phase=collective"),
    ("damped", "kill:rank=1,step=6,phase=forward"),
    ("late", "kill:rank=1,step=9,phase=backward"),
    ("logged", "kill:rank=1,step=6,phase=backward"),
    ("logged", "kill:rank=0,step=7,phase=in_step"),
]


@pytest.mark.parametrize(("what", "kill"), CASES, ids=[f"{what}: {kill}" for what, kill in CASES])
def test_a_replacement_has_the_gradients_that_the_next_backward_adds_to(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, what: str, kill: str
) -> None:
    result = run_ttprun(SCRIPT, 2, faults=[kill], script_args=["--what", what])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(SCRIPT, 2, script_args=["--what", what]))


@pytest.mark.parametrize("what", ["gan", "never", "sharded"])
def test_gradients_are_kept_through_two_faults(run_ttprun: RunTtprun, undisturbed: Undisturbed, what: str) -> None:
    faults = ["kill:rank=1,step=6,phase=backward", "kill:rank=0,step=9,phase=forward"]
    result = run_ttprun(SCRIPT, 2, faults=faults, script_args=["--what", what])

    assert_only_replaced(result, 2)
    assert_same_outcome(result, undisturbed(SCRIPT, 2, script_args=["--what", what]))


def test_without_a_mirror_all_go_back_to_a_snapshot_that_has_the_gradients(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    fault, args = "kill:rank=1,step=6,phase=backward", ["--what", "sharded"]
    result = run_ttprun(SCRIPT, 2, faults=[fault], options=["--buddy", "off"], script_args=args)

    assert [(one["rung"], one["outcome"]) for one in result.incidents] == [("rewind", "recovered")], result.story()
    expected = undisturbed(SCRIPT, 2, script_args=args)
    assert (result.final, result.hashes) == (expected.final, expected.hashes), result.story()


def test_gradients_that_are_carried_for_the_first_time_are_named_in_that_step(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    result = run_ttprun(SCRIPT, 2, faults=["kill:rank=1,step=7,phase=before_step"], script_args=["--what", "late"])

    named = [event["boundary"] for event in result.events if event["event"] == "rank_hindered" and event["reason"]]
    assert named == [6, 6], result.story()
    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(SCRIPT, 2, script_args=["--what", "late"]))
