"""What cannot be proved is refused: each check of a replay, made to fail on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.harness import Run, assert_only_replaced, assert_same_outcome

KILL = "kill:rank=1,step=12,phase=before_step"

DIFFERENCES = [
    # what the script does otherwise when it runs a second time, a part of the reason
    ("operation", "inputs of collectives"),
    ("data", "another batch"),
    ("place", ", the lost rank was at"),
    ("shape", "has shape"),
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


HIDDEN = [
    # what depends on state that nobody records, a part of the reason
    ("augmentation", "loss number 1 of step 12"),
    ("draws", "loss number 1 of step 12"),
]


@pytest.mark.parametrize(("kind", "reason"), HIDDEN)
def test_state_that_nobody_records_is_found_by_what_the_lost_rank_has_given_to_the_step(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], kind: str, reason: str
) -> None:
    faults, script_args = ["kill:rank=1,step=12,phase=collective"], ["--kind", kind]

    result = run_ttprun("hidden_state.py", 2, faults=faults, options=["--max-restarts", "1"], script_args=script_args)

    assert result.incidents[0]["outcome"] == "restarted", result.story()
    assert reason in result.incidents[0]["reason"]
    assert result.final == undisturbed("hidden_state.py", 2, script_args).final


def test_other_random_numbers_are_refused_where_the_lost_rank_had_given_nothing_to_the_step(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    faults, script_args = ["kill:rank=1,step=12,phase=forward"], ["--kind", "draws"]

    result = run_ttprun("hidden_state.py", 2, faults=faults, options=["--max-restarts", "1"], script_args=script_args)

    assert "other random states (python) than the lost rank at boundary 12" in result.incidents[0]["reason"], (
        result.story()
    )
    assert result.final == undisturbed("hidden_state.py", 2, script_args).final


def test_an_incident_names_what_was_equal_and_what_is_not_proved(run_ttprun: Callable[..., Run]) -> None:
    result = run_ttprun(
        "hidden_state.py", 2, faults=["kill:rank=1,step=12,phase=before_step"], script_args=["--kind", "measured"]
    )

    assert_only_replaced(result)
    assert result.incidents[0]["equal"] == [
        "rank 1: place in the script, 1 loop, 1 batch of a DataLoader at boundary 12",
        "rank 1: random states (numpy, python, torch) on arriving at boundary 12",
        "rank 1: 1 batch of a DataLoader in step 12",
        "rank 1: 1 loss in step 12",
        "rank 1: 1 input of a collective in step 12",
        "rank 1: weights, gradients and optimizer state, those of its replicas, at boundary 14",
    ]
    assert len(result.incidents[0]["not_proved"]) == 1, result.story()
    assert "perhaps a measured time" in result.incidents[0]["not_proved"][0]


@pytest.mark.parametrize("kind", ["alone", "straddle"])
def test_ranks_that_do_not_step_together_lose_their_protection_and_train_on(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], kind: str
) -> None:
    options, script_args = ["--commit-timeout-s", "1", "--hang-timeout-s", "60"], ["--kind", kind]

    result = run_ttprun("steps_alone.py", 2, options=options, script_args=script_args)

    assert result.incidents == []
    reasons = [event["reason"] for event in result.events if event["event"] == "rank_unprotected"]
    assert "the ranks do not step together" in reasons[0], result.story()
    assert_same_outcome(result, undisturbed("steps_alone.py", 2, script_args))
