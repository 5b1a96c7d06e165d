"""A script may write to a few places of large arrays in ways that nothing counts: the kernel tells that it has."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome
from ttprun.capture.values import written_pages

SCRIPT = "sparse_writes.py"


@pytest.mark.parametrize("phase", ["collective", "before_step"])
def test_a_replacement_has_the_rows_that_were_written_by_numpy_alone(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str
) -> None:
    probe = np.zeros(1 << 20)
    if written_pages.watch(probe.ctypes.data, probe.nbytes) is None:
        pytest.skip("this kernel or container does not tell what is written")
    written_pages.forget()

    # The second one is of a process that was a standby's copy.
    faults = ["kill:rank=1,step=10,phase=backward", f"kill:rank=1,step=30,phase={phase}"]
    run = run_ttprun(SCRIPT, 2, faults=faults)

    assert [(found["rung"], found["outcome"]) for found in run.incidents] == [("replace", "recovered")] * 2, run.story()
    assert_same_outcome(run, undisturbed(SCRIPT, 2))
