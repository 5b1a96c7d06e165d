"""Scripts like GANs: at every second boundary lives what no record holds, and a job must go on from the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import (
    RunTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
)

GAN = "gan_one_fake.py"  # odd boundaries, of the discriminator, are open

PREEMPTED = {
    # arguments, rank, step, phase
    "backward": ([], 1, 21, "backward"),
}


@pytest.mark.parametrize(("args", "rank", "step", "phase"), PREEMPTED.values(), ids=PREEMPTED)
def test_a_gan_that_is_preempted_between_its_two_steps_goes_on_by_the_same_command_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, args: list[str], rank: int, step: int, phase: str
) -> None:
    same = {"options": ["--save-dir", str(tmp_path / "save")], "script_args": args, "out": tmp_path / "out"}

    first = run_ttprun(GAN, 2, faults=[f"preempt:rank={rank},step={step},phase={phase}"], **same)
    second = run_ttprun(GAN, 2, **same)

    assert first.exit_code == 143, first.story()
    resumed_at = second.status["resume"]["boundary"]
    assert resumed_at == first.status["checkpoint"]["boundary"], first.story() + second.story()
    assert second.incidents == [], second.story()
    second.stdout = {number: first.stdout[number] + second.stdout[number] for number in (0, 1)}
    assert_same_outcome(second, undisturbed(GAN, 2, args))


def test_a_gan_that_loses_a_rank_between_its_two_steps_goes_back_to_a_snapshot_and_ends_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(GAN, 2, faults=["kill:rank=1,step=17,phase=backward"], options=["--snapshot-every", "5steps"])

    taken = [event["boundary"] for event in run.events if event["event"] == "snapshot_taken"]
    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("rewind", "recovered"), run.story()
    assert incident["boundary"] in taken
    assert {boundary % 2 for boundary in taken} == {0}, run.story()
    reference = undisturbed(GAN, 2)
    assert (run.exit_code, run.final) == (0, reference.final), run.story()
    assert run.hashes == reference.hashes, run.story()


IN_BACKWARD = "steps_in_backward.py"  # 10 iterations of 4 steps: the first two in the backward pass, or all


def test_a_rank_lost_in_a_backward_pass_that_has_taken_a_step_sends_all_back_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(
        IN_BACKWARD, 2, faults=["kill:rank=1,step=22,phase=collective"], options=["--snapshot-every", "4steps"]
    )

    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("rewind", "recovered"), run.story()
    assert "is taken inside a backward pass, whose rest would differ" in incident["reason"], run.story()
    assert incident["boundary"] % 4 in (3, 0), run.story()
    assert run.final == undisturbed(IN_BACKWARD, 2).final, run.story()


def test_a_rank_lost_behind_a_backward_pass_that_has_taken_steps_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(
        IN_BACKWARD, 2, faults=["kill:rank=1,step=20,phase=forward", "kill:rank=0,step=28,phase=collective"]
    )

    assert_only_replaced(run, incidents=2)
    assert_same_outcome(run, undisturbed(IN_BACKWARD, 2))


def test_a_script_that_takes_all_its_steps_in_backward_passes_is_reported_before_a_rank_is_lost(
    run_ttprun: RunTtprun,
) -> None:
    run = run_ttprun(IN_BACKWARD, 2, script_args=["--all"], faults=["kill:rank=1,step=22,phase=collective"])

    said = "its optimizers step inside the backward pass, and a replacement could not compute the rest of the pass"
    assert run.exit_code == 137, run.story()
    assert said in next(line for line in run.output.splitlines() if "not protected: rank" in line), run.story()
    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("restart", "failed"), run.story()
