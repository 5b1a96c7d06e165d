"""A transient error of the script is answered in the same process: it runs the script again, and nothing is lost.

The moments are those of test_replace.py, which says the scripts' sizes too.
"""

from __future__ import annotations

import re

import pytest

from tests.e2e.harness import (
    EPOCHS,
    PLAIN,
    WHILE_TRUE,
    RunTtprun,
    Undisturbed,
    assert_recovered_by,
    assert_same_outcome,
)

TRACES = "leaves_traces.py"
RETRY = ("--retry-on", "^InjectedFaultError: injected")

MOMENTS = [
    # script, ranks, (rank that meets the error, step, phase), one incident after the other
    (EPOCHS, 3, [(1, 5, "forward"), (0, 20, "backward"), (2, 33, "before_step")]),
    (WHILE_TRUE, 2, [(1, 0, "backward"), (0, 10, "validation"), (0, 26, "after_step")]),
    (PLAIN, 4, [(2, 10, "collective"), (0, 11, "backward"), (3, 24, "after_step")]),
]


@pytest.mark.parametrize(("script", "ranks", "moments"), MOMENTS)
def test_a_script_that_meets_transient_errors_is_run_again_in_the_same_processes_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, ranks: int, moments: list[tuple[int, int, str]]
) -> None:
    faults = [f"exception:rank={rank},step={step},phase={phase}" for rank, step, phase in moments]

    result = run_ttprun(script, ranks, faults=faults, options=RETRY)

    assert_recovered_by(result, ["rerun"] * len(moments))
    assert [incident["kind"] for incident in result.incidents] == ["exception"] * len(moments)
    assert_same_outcome(result, undisturbed(script, ranks))
    assert result.process_counts == [1] * ranks


def test_what_a_script_has_left_in_its_process_does_not_trouble_its_next_run(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults = ["exception:rank=1,step=12,phase=forward", "exception:rank=0,step=20,phase=after_step"]

    result = run_ttprun(TRACES, 2, faults=faults, options=RETRY)

    assert_recovered_by(result, ["rerun", "rerun"])
    assert_same_outcome(result, undisturbed(TRACES, 2))
    assert result.process_counts == [1, 1]


@pytest.mark.parametrize("second", ["exception:rank=1,phase=replay", "kill:rank=1,phase=transfer"])
def test_a_rerun_that_fails_is_followed_by_a_replacement(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, second: str
) -> None:
    result = run_ttprun(PLAIN, 2, faults=["exception:rank=1,step=12,phase=backward", second], options=RETRY)

    assert_recovered_by(result, ["replace"])
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    assert result.process_counts == [1, 2]


def test_a_rerun_that_does_not_get_there_in_time_is_followed_by_a_replacement(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults = ["exception:rank=0,step=12,phase=backward", "sleep:rank=0,phase=replay"]

    result = run_ttprun(PLAIN, 2, faults=faults, options=[*RETRY, "--replay-timeout-s", "10"])

    assert_recovered_by(result, ["replace"])
    # A busy machine gets more: its time counts as it lets time pass.
    assert re.search(r"it had \d+ s to replay", result.incidents[0]["reason"]), result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2))


@pytest.mark.parametrize(
    ("options", "script_args"),
    [
        (["--retry-on", "OutOfMemoryError"], []),  # another error
        ([*RETRY, "--rungs", "reconnect,replace,restart"], []),  # switched off
        (RETRY, ["--thread"]),  # a thread that nobody can end
    ],
)
def test_what_is_not_run_again_is_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, options: list[str], script_args: list[str]
) -> None:
    faults = ["exception:rank=1,step=12,phase=backward"]

    result = run_ttprun(TRACES, 2, faults=faults, options=options, script_args=script_args)

    assert_recovered_by(result, ["replace"])
    assert_same_outcome(result, undisturbed(TRACES, 2, script_args))
    assert result.process_counts == [1, 2]
