"""What is wrong with the numbers while every process is well: a replica that has diverged, a gradient that is NaN."""

from __future__ import annotations

from tests.e2e.harness import (
    RunTtprun,
)

FLIP = "flip-bit:rank=1,step=7,phase=before_step,seed=5"
NAN = "nan:rank=1,step=7,phase=collective"


def test_a_rank_whose_weights_differ_is_named_and_gets_those_of_the_majority(run_ttprun: RunTtprun) -> None:
    run = run_ttprun("epochs_dataloader.py", 3, faults=[FLIP], options=["--verify-every", "1"])

    assert run.exit_code == 0, run.story()
    (incident,) = run.incidents
    assert (incident["kind"], incident["ranks"]) == ("divergence", [1]), run.story()
    assert incident["outcome"] == "recovered", run.story()
    assert "weights differ" in incident["reason"], run.story()
    assert len({line.split(" sha256 ")[1] for lines in run.hashes.values() for line in lines if " model " in line}) == 1


def test_one_nan_in_a_gradient_is_reported_once_at_the_next_step_at_the_latest_and_training_goes_on(
    run_ttprun: RunTtprun,
) -> None:
    run = run_ttprun("plain_tensors.py", 2, faults=[NAN])

    assert run.exit_code == 0, run.story()
    (found,) = (event for event in run.events if event["event"] == "nan_found")
    assert (found["rank"], found["step"]) in [(1, 7), (None, 8)], run.story()
    assert run.output.count("training continues (on_nan: warn)") == 1, run.story()
