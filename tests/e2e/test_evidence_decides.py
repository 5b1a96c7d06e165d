"""A replacement is refused for a contradiction, not because an object beside the training cannot be read."""

from __future__ import annotations

import pytest

from tests.e2e.cases import recovered_and_undisturbed, slow
from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

SCRIPT = "unrecordable.py"  # 16 steps
KILLS = "kill:rank=1,step=7,phase=backward kill:rank=0,step=11,phase=collective"


@pytest.mark.parametrize(
    "case",
    [f"--kind lazy: {KILLS}", *(slow(f"--kind {kind}: {KILLS}") for kind in ("lock", "pipeline", "traced"))],
)
def test_what_cannot_be_recorded_and_does_not_matter_is_no_reason_to_refuse_a_replacement(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_same_outcome(*recovered_and_undisturbed(run_ttprun, undisturbed, SCRIPT, case))


def test_what_cannot_be_recorded_and_matters_is_found_by_the_loss_of_the_step(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    words = ["--kind", "scale"]

    run = run_ttprun(
        SCRIPT, 2, faults=["kill:rank=1,step=11,phase=collective"], options=["--max-restarts", "1"], script_args=words
    )

    assert "loss number 1 of step 11 differs" in run.incidents[0]["reason"], run.story()
    assert run.final == undisturbed(SCRIPT, 2, words).final


def test_by_strict_proof_what_cannot_be_recorded_refuses_a_replacement(run_ttprun: RunTtprun) -> None:
    options = ["--proof", "strict", "--max-restarts", "1"]

    run = run_ttprun(
        SCRIPT, 2, faults=["kill:rank=1,step=11,phase=collective"], options=options, script_args=["--kind", "scale"]
    )

    assert "scales cannot be recorded" in run.incidents[0]["reason"], run.story()
