"""Optimizers that are given a closure: forward, backward and collectives run inside `Optimizer.step`."""

from __future__ import annotations

import pytest

from tests.e2e.harness import (
    RunTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

CLOSURES = "closure_steps.py"  # 18 steps, 6 an epoch


@pytest.mark.parametrize(
    ("optimizer", "faults"),
    [
        (
            "adamw",
            [
                "kill:rank=1,step=3,phase=forward",
                "kill:rank=0,step=7,phase=collective",
                "kill:rank=1,step=12,phase=in_step",
            ],
        ),
        ("adamw", ["kill:rank=0,step=2,phase=backward", "kill:rank=0,step=6,phase=before_step"]),
        ("adamw", ["kill:rank=0,phase=setup", "kill:rank=1,step=0,phase=backward"]),
        ("wrapper", ["kill:rank=1,step=4,phase=backward", "kill:rank=0,step=9,phase=in_step"]),
    ],
)
def test_a_rank_killed_inside_a_closure_or_in_the_step_after_it_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, optimizer: str, faults: list[str]
) -> None:
    script_args = [f"--optimizer={optimizer}"]

    result = run_ttprun(CLOSURES, 2, faults=faults, script_args=script_args)

    assert_only_replaced(result, incidents=len(faults))
    assert_same_outcome(result, undisturbed(CLOSURES, 2, script_args))


def test_an_optimizer_that_keeps_a_loss_of_each_rank_s_own_goes_back_to_a_snapshot(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    script_args = ["--optimizer=lbfgs-once"]  # LBFGS keeps the last loss in its state

    kill = "kill:rank=1,step=13,phase=backward"
    options = ["--snapshot-every", "5steps"]
    result = run_ttprun(CLOSURES, 2, faults=[kill], options=options, script_args=script_args)

    assert [incident["rung"] for incident in result.incidents] == ["rewind"], result.story()
    assert result.incidents[0]["outcome"] == "recovered", result.story()
    assert "model.module.0.weight" in result.incidents[0]["reason"], result.story()
    assert result.hashes == undisturbed(CLOSURES, 2, script_args).hashes, result.story()


def test_an_optimizer_that_calls_its_closure_several_times_is_refused_at_its_first_step_with_the_reason(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    script_args = ["--optimizer=lbfgs"]

    result = run_ttprun(CLOSURES, 2, script_args=script_args)

    assert_same_outcome(result, undisturbed(CLOSURES, 2, script_args))
    assert_survivors_kept_their_pids(result)
    reasons = [event["reason"] for event in result.events if event["event"] == "rank_unprotected"]
    assert any("calls its closure several times" in reason for reason in reasons), result.story()
