"""Hooks of the script's own on `Optimizer.step`: what they print and write comes out once, also around a fault."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

STEP_HOOKS = "step_hooks.py"  # 12 steps


@pytest.mark.parametrize("phases", [("in_step", "backward"), ("after_step", "before_step")])
def test_what_hooks_of_a_step_print_and_write_comes_out_once_where_a_rank_was_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phases: tuple[str, str]
) -> None:
    faults = [
        f"kill:rank={rank},step={step},phase={phase}"
        for (rank, step), phase in zip(((1, 4), (0, 8)), phases, strict=True)
    ]

    result = run_ttprun(STEP_HOOKS, 2, faults=faults)

    assert_only_replaced(result, incidents=2)
    assert_same_outcome(result, undisturbed(STEP_HOOKS, 2))
