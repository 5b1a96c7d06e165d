"""A transient error of the script is answered in the same process: it runs the script again, and nothing is lost.

The moments are those of test_replace.py, which says the scripts' sizes too.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import (
    EPOCHS,
    PLAIN,
    RunTtprun,
    Undisturbed,
    assert_recovered_by,
    assert_same_outcome,
)

RETRY = ("--retry-on", "^InjectedFaultError: injected")

MOMENTS = [
    # script, ranks, (rank that meets the error, step, phase), one incident after the other
    (EPOCHS, 3, [(1, 5, "forward"), (0, 20, "backward"), (2, 33, "before_step")]),
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


@pytest.mark.parametrize("second", ["exception:rank=1,phase=replay"])
def test_a_rerun_that_fails_is_followed_by_a_replacement(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, second: str
) -> None:
    result = run_ttprun(PLAIN, 2, faults=["exception:rank=1,step=12,phase=backward", second], options=RETRY)

    assert_recovered_by(result, ["replace"])
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    assert result.process_counts == [1, 2]
