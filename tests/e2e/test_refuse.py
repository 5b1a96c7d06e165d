"""What cannot be proved is refused: each check of a replay, made to fail on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.harness import Run, assert_same_outcome

KILL = "kill:rank=1,step=12,phase=before_step"

DIFFERENCES = [
    # what the script does otherwise when it runs a second time, a part of the reason
    ("operation", "inputs of collectives"),
    ("data", "another batch"),
]


@pytest.mark.parametrize(("kind", "reason"), DIFFERENCES)
def test_a_replacement_that_differs_is_refused_with_a_reason_and_all_ranks_start_anew(
    run_ttprun: Callable[..., Run], kind: str, reason: str
) -> None:
    result = run_ttprun(
        "second_time.py", 2, faults=[KILL], options=["--max-restarts", "1"], script_args=["--kind", kind]
    )

    assert result.incidents[-1]["outcome"] == "restarted"
    assert reason in result.incidents[-1]["reason"]
    assert result.exit_code == 0


def test_ranks_that_do_not_step_together_lose_their_protection_and_train_on(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    options = ["--commit-timeout-s", "1", "--hang-timeout-s", "60"]

    result = run_ttprun("steps_alone.py", 2, options=options)

    assert result.incidents == []
    reasons = [event["reason"] for event in result.events if event["event"] == "rank_unprotected"]
    assert "the ranks do not step together" in reasons[0], result.story()
    assert_same_outcome(result, undisturbed("steps_alone.py", 2))
