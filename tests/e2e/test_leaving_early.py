"""A rank that leaves with exit code 0 while others need it: the job ends as under torchrun, and its state is saved."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun

SCRIPT = "leaves_early.py"


@pytest.mark.parametrize("how", ["sys.exit", "handler"])
def test_a_job_whose_rank_leaves_in_mid_run_with_exit_code_0_ends_with_a_line_and_its_state(
    run_ttprun: RunTtprun, how: str
) -> None:
    result = run_ttprun(SCRIPT, 2, script_args=["--how", how])

    assert result.exit_code == 1, result.story()
    last = result.last_words
    assert last.startswith(
        "ttprun: the job has ended: rank 1 left with exit code 0 while rank 0 still needed it; its state"
    )
    assert result.process_counts == [1, 1]  # it is not called back: it would leave again
    assert any(event["event"] == "checkpoint_written" and event["boundary"] == 8 for event in result.events)


def test_a_job_with_a_restart_left_uses_it_for_a_rank_that_has_left(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(SCRIPT, 2, script_args=["--how", "os._exit"], options=["--max-restarts", "1"])

    assert result.exit_code == 1, result.story()
    assert result.process_counts == [2, 2]


def test_a_thread_that_calls_sys_exit_ends_itself_alone(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(SCRIPT, 2, script_args=["--how", "thread"])

    assert result.exit_code == 0, result.story()
    assert result.incidents == []
