"""Engines that show the optimizer a part of its parameters at each step: whoever is repaired gets all of them."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "shown_groups.py"  # 14 iterations of 2 optimizer steps
KILLS = [(1, 9, "backward"), (0, 13, "forward"), (1, 16, "in_step"), (0, 21, "after_step")]


@pytest.mark.parametrize(
    ("show", "own"), [("groups", ["--own"]), ("parameters", [])], ids=["groups-mirror", "parameters-replicas"]
)
def test_a_rank_is_replaced_with_what_its_optimizer_was_not_shown(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, show: str, own: list[str]
) -> None:
    args = ["--show", show, *own]
    faults = [f"kill:rank={rank},step={step},phase={phase}" for rank, step, phase in KILLS]

    run = run_ttprun(SCRIPT, 2, faults=faults, script_args=args)

    assert_only_replaced(run, incidents=len(KILLS))
    assert_same_outcome(run, undisturbed(SCRIPT, 2, args))


@pytest.mark.parametrize("show", ["groups"])
def test_a_snapshot_holds_what_the_optimizer_was_not_shown(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, show: str
) -> None:
    args = ["--show", show, "--own"]
    options = ["--buddy", "off", "--snapshot-every", "5steps"]

    run = run_ttprun(SCRIPT, 2, faults=["kill:rank=1,step=13,phase=backward"], options=options, script_args=args)

    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("rewind", "recovered")], run.story()
    assert run.final == undisturbed(SCRIPT, 2, args).final, run.story()
