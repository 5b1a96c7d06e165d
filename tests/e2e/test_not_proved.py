"""State that no attribute shows is restored, or named before and after a fault."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.harness import EPOCHS, Run, assert_only_replaced, assert_same_outcome

KILL = "kill:rank=1,step=20,phase=backward"


def test_what_events_and_memory_of_c_hold_is_restored_and_the_rest_is_named(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    result = run_ttprun("keeps_much.py", 2, faults=[KILL])

    untold = "it can change, and does not show its state"
    named = [f"compressor (zlib.Compress): {untold}", f"inbox (__main__.Inbox): {untold}"]
    assert [incident["outcome"] for incident in result.incidents] == ["recovered"], result.story()
    assert result.status["not_proved"] == result.incidents[0]["not_proved"] == named
    assert f"not proved: {'; '.join(named)}" in result.output
    assert_same_outcome(result, undisturbed("keeps_much.py", 2))


def test_nothing_of_an_ordinary_script_is_named(run_ttprun: Callable[..., Run]) -> None:
    result = run_ttprun(EPOCHS, 2)

    assert [event for event in result.events if event["event"] == "not_proved"] == []
    assert result.status["not_proved"] == []


def test_a_rank_that_logs_through_a_queue_and_a_thread_is_replaced(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    result = run_ttprun("writes_beside.py", 2, faults=[KILL])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed("writes_beside.py", 2))
    lines = (result.folder / "out" / "events-1.txt").read_text().splitlines()
    assert lines[-1].startswith("loss 29")


def test_what_only_an_evaluation_has_made_is_made_again_or_named_and_costs_no_restart(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    """Lost between two steps: no loss would show what the objects do; the replay has passed over all evaluations."""
    result = run_ttprun("evaluates_with_locks.py", 2, faults=["kill:rank=1,step=19,phase=after_step"])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed("evaluates_with_locks.py", 2))
    (named,) = [name for name in result.incidents[0]["not_proved"] if "evaluation" in name]
    assert "FileLock, is not in the replacement" in named, result.story()
