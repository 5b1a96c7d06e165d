"""What an epoch does before its first step may need what the epochs before have made, which a replay passes over."""

from __future__ import annotations

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

HEADS = "heads_of_epochs.py"  # 16 steps, 4 an epoch


def test_a_rank_is_replaced_though_its_epoch_begins_with_what_the_ones_before_have_made(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    result = run_ttprun(HEADS, 2, faults=["kill:rank=1,step=10,phase=backward", "kill:rank=0,step=13,phase=forward"])

    assert_only_replaced(result, incidents=2)
    assert_same_outcome(result, undisturbed(HEADS, 2))
    assert "is replaced once more: the replay jumps into a loop" in result.status["incidents"][0]["reason"]


def test_an_epoch_that_begins_with_what_no_replay_can_make_ends_the_job_with_the_scripts_error(
    run_ttprun: RunTtprun,
) -> None:
    result = run_ttprun(HEADS, 2, faults=["kill:rank=1,step=10,phase=backward"], script_args=["--keep-objects"])

    (incident,) = result.incidents
    assert incident["outcome"] == "failed", result.story()
    assert "IndexError: list index out of range" in incident["reason"]
