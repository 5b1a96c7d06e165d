"""When an incident is not answered by another attempt: scenario A28, and what the user has switched off."""

from __future__ import annotations

import pytest

from tests.e2e.harness import (
    RunTtprun,
)


@pytest.mark.parametrize("when", ["early", "late"])
def test_an_error_of_the_script_that_comes_back_at_the_same_step_ends_the_job_with_exit_code_1(
    run_ttprun: RunTtprun, when: str
) -> None:
    run = run_ttprun("fails_in_step.py", 2, script_args=["--late"] if when == "late" else [])

    assert run.exit_code == 1, run.story()
    assert run.incidents[0]["kind"] == "exception", run.story()
    assert run.incidents[-1]["outcome"] == "failed", run.story()
    assert "rank 1" in run.status["reason"], run.story()
    assert "ValueError: the fifth batch has no labels" in run.status["reason"], run.story()
    assert "in step 5" in run.status["reason"], run.story()
    assert "[rank1]: ValueError: the fifth batch has no labels" in run.stderr[1], run.story()


def test_more_incidents_of_one_kind_than_allowed_within_an_hour_end_the_job_with_93(run_ttprun: RunTtprun) -> None:
    faults = ["kill:rank=1,step=3", "kill:rank=0,step=13"]
    run = run_ttprun("plain_tensors.py", 2, faults=faults, options=["--max-incidents-per-hour", "1"])

    assert run.exit_code == 93, run.story()
    assert [incident["outcome"] for incident in run.incidents] == ["recovered", "failed"], run.story()
    assert "max_incidents_per_hour" in run.status["reason"], run.story()
