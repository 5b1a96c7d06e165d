"""Steps that another process takes again (--verify-steps): a flipped bit is found, named, and taken back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import EPOCHS, Launch, Run, RunTtprun, assert_same_outcome

GATED = "gated_steps.py"
EVERY = 15  # the first one that is taken again, once a standby is ready, is of rank 1, the second one of rank 0
# What a bit is flipped in -> the fault, and what is found first.
CORRUPTIONS = {
    "gradient": (
        "flip-gradient:rank=0,step=30,phase=backward,seed=5",
        "the gradient of net.0.weight (input of allreduce 1)",
    ),
    "batch": ("flip-batch:rank=0,step=30,phase=forward,seed=5", "the gradient of net."),  # too little for the loss
    "weight": ("flip-bit:rank=0,step=30,phase=forward,seed=5", "loss 1"),
    "optimizer state": ("flip-state:rank=0,step=30,phase=forward,seed=5", "weights of "),
}


def corrupted(start_ttprun: Callable[..., Launch], folder: Path, fault: str, verify_steps: str) -> Run:
    """A run with a fault, in which the first verified step is equal."""
    gate, second, third = folder / "gate", folder / "second", folder / "third"
    launch = start_ttprun(
        GATED,
        2,
        faults=[fault],
        options=["--verify-steps", verify_steps, "--verify-every", "0"],
        script_args=["--gate", str(gate), "--second", str(second), "--third", str(third)],
    )
    launch.wait_for_standby("ready")
    gate.touch()
    launch.wait_for_event("step_verified", finding="equal")
    second.touch()
    launch.wait_for_event("step_verified", finding="suspect")
    third.touch()
    return launch.finish()


@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("where", CORRUPTIONS)
def test_a_flipped_bit_is_found_by_two_other_processes_and_the_weights_are_those_of_an_undisturbed_run(
    where: str,
    is_sticky: bool,
    start_ttprun: Callable[..., Launch],
    undisturbed: Callable[..., Run],
    tmp_path: Path,
) -> None:
    fault, named = CORRUPTIONS[where]

    run = corrupted(start_ttprun, tmp_path, f"{fault},sticky=1" if is_sticky else fault, f"1/{EVERY}")

    (incident,) = run.incidents
    assert (incident["kind"], incident["ranks"], incident["rung"]) == ("corruption", [0], "rewind"), run.story()
    assert incident["outcome"] == "recovered", run.story()
    (verified,) = (event for event in run.events if event["event"] == "step_verified" and event["finding"] == "suspect")
    assert (verified["rank"], verified["step"]) == (0, 2 * EVERY), run.story()
    assert verified["what"].startswith(named), run.story()
    assert "rank 0 is suspect: it has computed" in run.output, run.story()
    reference = undisturbed(GATED, 2)
    assert (run.hashes, run.final, run.exit_code) == (reference.hashes, reference.final, 0), run.story()


def test_if_it_is_compared_before_the_optimizer_uses_it_no_step_is_lost(
    start_ttprun: Callable[..., Launch], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    fault, named = CORRUPTIONS["gradient"]

    run = corrupted(start_ttprun, tmp_path, fault, f"1/{EVERY},before")

    (incident,) = run.incidents
    assert (incident["outcome"], incident["ranks"], incident["steps_lost"]) == ("recovered", [0], 0), run.story()
    assert f"it has computed {named} of step {2 * EVERY} otherwise" in incident["reason"], run.story()
    reference = undisturbed(GATED, 2)
    assert (run.hashes, run.final, run.exit_code) == (reference.hashes, reference.final, 0), run.story()


def test_of_a_sound_run_with_dropout_and_workers_nothing_is_said_and_its_outcome_is_the_same(
    run_ttprun: RunTtprun, undisturbed: Callable[..., Run]
) -> None:
    args = ["--per-rank", "1200", "--workers", "1"]  # 450 steps

    run = run_ttprun(EPOCHS, 2, options=["--verify-steps", "1/10"], script_args=args)

    verified = [event for event in run.events if event["event"] == "step_verified"]
    assert {event["rank"] for event in verified} == {0, 1}, run.story()
    assert {event["finding"] for event in verified} == {"equal"}, run.story()
    assert {event["reason"] for event in run.events if event["event"] == "step_not_verified"} <= {"no standby is ready"}
    assert "was taken again by another process, and is equal" in run.output, run.story()
    assert not run.incidents, run.story()
    assert_same_outcome(run, undisturbed(EPOCHS, 2, script_args=args))
