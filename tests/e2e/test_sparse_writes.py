"""A script may write to a few places of large arrays in ways that nothing counts: it is seen when its turn comes."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

SCRIPT = "sparse_writes.py"


@pytest.mark.parametrize("phase", ["collective", "before_step"])
def test_a_replacement_has_the_rows_that_were_written_by_numpy_alone(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str
) -> None:
    # The second one is of a process that was a standby's copy.
    faults = ["kill:rank=1,step=10,phase=backward", f"kill:rank=1,step=30,phase={phase}"]
    run = run_ttprun(SCRIPT, 2, faults=faults)

    assert [(found["rung"], found["outcome"]) for found in run.incidents] == [("replace", "recovered")] * 2, run.story()
    assert_same_outcome(run, undisturbed(SCRIPT, 2))
