"""A script may change weights itself, between steps: whoever is repaired gets those that the step has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "weights_by_hand.py"
KILLS = [
    # manner, step, phase
    ("swap", 11, "validation"),  # while the averaged weights stand in the place of the trained ones
    ("swap", 11, "before_step"),
    ("decay", 10, "after_step"),
    ("data", 10, "collective"),
]


@pytest.mark.parametrize(("manner", "step", "phase"), KILLS)
def test_a_rank_that_is_replaced_behind_a_change_by_hand_is_as_the_others(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, manner: str, step: int, phase: str
) -> None:
    args = ["--manner", manner]
    run = run_ttprun(SCRIPT, 2, faults=[f"kill:rank=1,step={step},phase={phase}"], script_args=args)

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed(SCRIPT, 2, args))


def test_a_change_that_nobody_could_see_ends_in_a_restart_and_never_in_other_weights(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    args = ["--manner", "once"]
    run = run_ttprun(
        SCRIPT, 2, faults=["kill:rank=1,step=11,phase=backward"], options=["--max-restarts", "1"], script_args=args
    )

    (restarted,) = run.incidents
    assert (restarted["rung"], restarted["outcome"]) == ("restart", "restarted"), run.story()
    assert "loss number 1 of step 11 differs from the lost rank's" in restarted["reason"], run.story()
    assert run.exit_code == 0, run.story()
    assert run.final == undisturbed(SCRIPT, 2, args).final, run.story()


def test_a_checkpoint_behind_a_change_by_hand_has_the_weights_of_its_boundary(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    options = ["--save-dir", str(tmp_path / "save")]
    how = {"options": options, "script_args": ["--manner", "swap"], "out": tmp_path / "out"}
    first = run_ttprun(SCRIPT, 2, faults=["preempt:rank=1,step=11,phase=validation"], **how)
    second = run_ttprun(SCRIPT, 2, **how)

    assert first.exit_code == 143, first.story()
    assert first.status["checkpoint"]["reason"] == "", first.story()
    second.stdout = {rank: first.stdout[rank] + second.stdout[rank] for rank in range(2)}
    assert_same_outcome(second, undisturbed(SCRIPT, 2, ["--manner", "swap"]))
