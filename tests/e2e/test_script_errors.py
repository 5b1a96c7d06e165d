"""An error of the script's own: tried again as often as was asked for, with a line each time, and exit code 1."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun

SCRIPT = "fails_at_step.py"
RAISED = "rank 1 raised ValueError: bad value (fails_at_step.py:32) in step 8"


@pytest.mark.parametrize(("retries", "runs"), [(0, 1), (2, 3)])
def test_an_exception_is_tried_again_as_often_as_asked_for_and_ends_the_job_with_exit_code_1(
    run_ttprun: RunTtprun, retries: int, runs: int
) -> None:
    result = run_ttprun(SCRIPT, 2, script_args=["--how", "raise"], options=["--exception-retries", str(retries)])

    assert result.exit_code == 1, result.story()
    assert result.process_counts == [1, runs]
    frames = [line for line in result.stderr[1] if '  File "/' in line]  # each process prints its own
    assert len(frames) == runs
    assert [line for line in frames if SCRIPT not in line] == []  # none of ours, nor of what has run the script
    tries = [line.rpartition(": ")[2] for line in result.output.splitlines() if "trying again" in line]
    assert tries == [f"trying again, {number} of {retries + 1}" for number in range(2, runs + 1)]
    assert result.last_words.startswith(f"ttprun: the job has ended: {RAISED}")


def test_an_exit_with_a_code_is_the_cause_and_not_the_connections_that_broke_by_it(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(SCRIPT, 2, script_args=["--how", "exit"], options=["--exception-retries", "0"])

    assert result.exit_code == 1, result.story()
    last = result.last_words
    assert last.startswith("ttprun: the job has ended: rank 1 exited with code 3 in step 8; not replaced: this is an")


@pytest.mark.parametrize(
    ("script_args", "said"),
    [
        (["--how", "raise", "--at", "0", "--thread"], "rank 1: its script has failed, but gpu-monitor"),
        (["--how", "exit", "--nproc-per-node", "2"], "fails_at_step.py got --nproc-per-node: ttprun's own options"),
    ],
    ids=["an error, and a thread that is no daemon", "argparse refuses ttprun's options"],
)
def test_what_fails_before_the_first_step_ends_the_job_at_once(
    run_ttprun: RunTtprun, script_args: list[str], said: str
) -> None:
    result = run_ttprun(SCRIPT, 2, script_args=script_args)

    assert result.exit_code == 1, result.story()
    assert result.process_counts == [1, 1]
    assert said in result.output, result.story()
    assert "recovered" not in result.output


def test_a_crash_in_the_same_line_of_the_same_step_ends_the_job_with_the_scripts_stack(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(SCRIPT, 2, script_args=["--how", "segfault"])

    assert result.exit_code == 93, result.story()
    assert result.process_counts == [1, 2]
    assert "not replaced: a new process crashes in the same line of the same step" in result.last_words
    assert "traceback : The script, most recent call first:" in result.output
    assert "recovered" not in result.output
