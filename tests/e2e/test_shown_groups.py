"""Engines that show the optimizer a part of its parameters at each step: whoever is repaired gets all of them."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "shown_groups.py"  # 14 iterations of 2 optimizer steps
KILLS = [(1, 9, "backward"), (0, 13, "forward"), (1, 16, "in_step"), (0, 21, "after_step")]


@pytest.mark.parametrize("own", [[], ["--own"]], ids=["replicas", "mirror"])
@pytest.mark.parametrize("show", ["groups", "parameters"])
def test_a_rank_is_replaced_with_what_its_optimizer_was_not_shown(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, show: str, own: list[str]
) -> None:
    args = ["--show", show, *own]
    faults = [f"kill:rank={rank},step={step},phase={phase}" for rank, step, phase in KILLS]

    run = run_ttprun(SCRIPT, 2, faults=faults, script_args=args)

    assert_only_replaced(run, incidents=len(KILLS))
    assert_same_outcome(run, undisturbed(SCRIPT, 2, args))


@pytest.mark.parametrize("show", ["groups", "parameters"])
def test_a_snapshot_holds_what_the_optimizer_was_not_shown(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, show: str
) -> None:
    args = ["--show", show, "--own"]
    options = ["--buddy", "off", "--snapshot-every", "5steps"]

    run = run_ttprun(SCRIPT, 2, faults=["kill:rank=1,step=13,phase=backward"], options=options, script_args=args)

    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("rewind", "recovered")], run.story()
    assert run.final == undisturbed(SCRIPT, 2, args).final, run.story()


def test_a_snapshot_is_taken_where_a_step_follows_that_shows_whether_a_replay_of_it_is_right(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    args = ["--show", "groups"]
    faults = ["kill:rank=1,step=8,phase=backward", "exception:rank=1,phase=replay"]

    # Nothing is computed between boundaries 5 and 6, where the snapshot is due: two steps of one iteration.
    run = run_ttprun(SCRIPT, 2, faults=faults, options=["--snapshot-every", "5steps"], script_args=args)

    assert [(one["rung"], one["outcome"], one["boundary"]) for one in run.incidents] == [("rewind", "recovered", 6)]
    assert run.final == undisturbed(SCRIPT, 2, args).final, run.story()
