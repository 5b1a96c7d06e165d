"""A replacement's set-up finds the file system as its rank's had found it, without what the run has written since."""

from __future__ import annotations

import pytest

from tests.e2e.cases import recovered_and_undisturbed, slow
from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

LOOKS = "looks_at_files.py"  # 12 steps; it saves and rotates checkpoints in each second one
WHAT = ("resume", "newest", "own_log")  # alone; without a name, all


@pytest.mark.parametrize(
    "case",
    [
        "--steps 12: kill:rank=1,step=7,phase=backward kill:rank=0,step=10,phase=forward",
        slow("--steps 12: kill:rank=1,step=0,phase=backward"),
        slow("--steps 12: kill:rank=0,step=1,phase=before_step kill:rank=0,step=9,phase=before_step"),
        *(slow(f"--what {what}: kill:rank=1,step=8,phase=backward") for what in WHAT),
    ],
)
def test_a_set_up_that_looks_at_files_is_answered_as_at_first(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_same_outcome(*recovered_and_undisturbed(run_ttprun, undisturbed, LOOKS, case))


@pytest.mark.slow
def test_a_script_that_ends_in_a_replay_is_reported_with_its_last_words(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(LOOKS, 2, faults=["kill:rank=1,step=8,phase=backward"], script_args=["--what", "by_a_command"])

    reasons = " ".join(event.get("reason") or "" for event in result.events)
    assert "the script's last words: a command has looked | " in reasons, result.story()
    assert "rank1 was trained before" in reasons, result.story()
