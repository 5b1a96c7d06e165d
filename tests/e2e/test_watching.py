"""Watching a script changes nothing in it."""

from __future__ import annotations

from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

SETTINGS = "config_of_locals.py"  # 16 steps


def test_a_script_whose_settings_are_its_locals_trains_as_under_torchrun_and_a_rank_of_it_is_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(SETTINGS, 2, faults=["kill:rank=1,step=8,phase=backward"])

    assert [(found["rung"], found["outcome"]) for found in run.incidents] == [("replace", "recovered")], run.story()
    assert_same_outcome(run, undisturbed(SETTINGS, 2))
