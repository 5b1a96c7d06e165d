"""A replacement is refused for a contradiction, not because an object beside the training cannot be read."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed

SCRIPT = "unrecordable.py"  # 16 steps


def test_what_cannot_be_recorded_and_matters_is_found_by_the_loss_of_the_step(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(SCRIPT, 2, faults=["kill:rank=1,step=11,phase=collective"], options=["--max-restarts", "1"])

    assert "loss number 1 of step 11 differs" in run.incidents[0]["reason"], run.story()
    assert "main: scales cannot be recorded: it is the generator main.<locals>.<genexpr>, which" in run.output
    assert run.final == undisturbed(SCRIPT, 2).final


@pytest.mark.parametrize(("phase", "options"), [("collective", ["--snapshot-every", "10steps"])], ids=["snapshot"])
def test_ranks_that_go_back_are_measured_by_what_they_have_left_of_the_step_and_never_train_on_with_other_variables(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str, options: list[str]
) -> None:
    options = ["--max-restarts", "1", *options]

    run = run_ttprun(SCRIPT, 2, faults=[f"kill:rank=1,step=11,phase={phase}"], options=options)

    assert [incident["outcome"] for incident in run.incidents] == ["restarted"], run.story()
    assert "loss number 1 of step" in run.incidents[0]["reason"], run.story()
    assert run.final == undisturbed(SCRIPT, 2).final


def test_a_job_that_could_not_be_replayed_since_goes_back_to_the_snapshot_that_it_has_promised(
    run_ttprun: RunTtprun,
) -> None:
    run = run_ttprun(
        "unreplayable.py", 2, faults=["kill:rank=1,step=11,phase=collective"], options=["--snapshot-every", "1steps"]
    )

    assert "all ranks go back to the snapshot of step 1" in run.output, run.story()
    assert [(one["rung"], one["outcome"], one["steps_lost"]) for one in run.incidents] == [("rewind", "recovered", 10)]
