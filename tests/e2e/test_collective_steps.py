"""Optimizers that communicate inside step() (ZeRO by hand, Muon, torch's own), and ranks lost in the middle of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_same_outcome
from tests.e2e.test_checkpoints import Series, assert_resumed, assert_saved

SCRIPT = "steps_together.py"  # 30 steps; with muon each is two


def arguments(optimizer: str) -> list[str]:
    return ["--optimizer", optimizer]


def assert_replaced(run: Run, reference: Run, incidents: int = 1) -> None:
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("replace", "recovered")] * incidents, (
        run.story()
    )
    assert [one["steps_lost"] for one in run.incidents] == [0] * incidents, run.story()
    assert_same_outcome(run, reference)


@pytest.mark.parametrize(
    ("optimizer", "ranks", "faults"),
    [
        ("adamw", 2, ["kill:rank=1,step=9,phase=in_step"]),
        ("muon", 2, ["kill:rank=0,step=8,phase=collective"]),
        ("torch", 4, ["kill:rank=2,step=12,phase=collective"]),
    ],
)
def test_a_rank_lost_in_a_step_takes_it_again_with_the_others(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, optimizer: str, ranks: int, faults: Sequence[str]
) -> None:
    """Its mirror has the state that the step began with, and the gradients."""
    run = run_ttprun(SCRIPT, ranks, faults=faults, script_args=arguments(optimizer))

    assert_replaced(run, undisturbed(SCRIPT, ranks, arguments(optimizer)))


@pytest.mark.parametrize(("optimizer", "step"), [("torch", 13)], ids=["torch"])
def test_without_a_mirror_all_go_back_to_a_snapshot(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, optimizer: str, step: int
) -> None:
    kill = f"kill:rank=1,step={step},phase=in_step"

    run = run_ttprun(
        SCRIPT,
        2,
        faults=[kill],
        options=["--buddy", "off", "--snapshot-every", "5steps"],
        script_args=arguments(optimizer),
    )

    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("rewind", "recovered")], run.story()
    assert "the optimizer communicates inside step(), and the state of rank 1 is not mirrored" in run.output
    reference = undisturbed(SCRIPT, 2, arguments(optimizer))
    assert (run.exit_code, run.final, run.hashes) == (0, reference.final, reference.hashes), run.story()


@pytest.mark.parametrize("phase", ["in_step"])
def test_a_job_that_is_ended_in_a_step_ends_the_step_and_saves_it(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, phase: str
) -> None:
    series = Series(run_ttprun, tmp_path, SCRIPT, 2, arguments("adamw"))

    saved = series.launch([f"preempt:rank=0,step=10,phase={phase}"])
    resumed = series.launch()

    assert_saved(saved, "ended")
    assert_resumed(resumed, saved.status["checkpoint"]["boundary"])
    assert_same_outcome(series.as_one(), undisturbed(SCRIPT, 2, arguments("adamw")))
