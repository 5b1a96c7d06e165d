"""Scripts that do one odd thing each: whoever is lost is replaced, and nothing differs; or it is refused, and said."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Replaced, RunTtprun, Undisturbed, assert_same_outcome, assert_survivors_kept_their_pids

# Script, its arguments: what befalls it.
ODD = [
    # The second of three trainings has taken one step; the replay passes over the first, and the groups it destroyed.
    "sweep.py: kill:rank=1,step=13,phase=backward kill:rank=0,step=31,phase=in_step",
    "sweep_own.py: kill:rank=1,step=17,phase=backward kill:rank=0,step=20,phase=forward",
    # The first step after a trial that was pruned, and one in the middle of another.
    "sweep_by_pass.py counted: kill:rank=1,step=14,phase=backward kill:rank=0,step=17,phase=backward",
    "worker_contexts.py --context forkserver: kill:rank=1,step=8,phase=backward",
    "worker_contexts.py --context forkserver --persistent: kill:rank=1,step=17,phase=backward",
    "worker_contexts.py --context fork --persistent --stateful: kill:rank=1,step=17,phase=backward",
]


@pytest.mark.parametrize("case", ODD)
def test_a_rank_of_a_script_that_does_something_odd_is_replaced_and_nothing_differs(
    replaced: Replaced, case: str
) -> None:
    if "--stateful" in case:
        pytest.importorskip("torchdata")
    replaced(case)


# The boundaries of a GAN lie after each of its two steps, the discriminator's first.
CARRIED = [
    "gan: kill:rank=1,step=9,phase=forward kill:rank=0,step=13,phase=in_step",  # the generator's pass, and the other's
    "never: kill:rank=1,step=5,phase=backward kill:rank=0,step=7,phase=in_step",
    "sharded: kill:rank=1,step=6,phase=backward kill:rank=0,step=9,phase=forward",
    "by-hand: kill:rank=1,step=6,phase=collective",
    "damped: kill:rank=1,step=6,phase=forward",
]


@pytest.mark.parametrize("case", CARRIED)
def test_a_replacement_has_the_gradients_that_the_next_backward_adds_to(replaced: Replaced, case: str) -> None:
    replaced(f"carried_gradients.py --what {case}")


# Nested in a generator that has begun anew;
# behind a step no loss shows it; the slice is in its loader's second round.
COUNTING = [
    "track: step=13",
    "generator: step=13",
    "slice: step=24",
]


@pytest.mark.parametrize("case", ["nested: step=15,phase=after_step", *(f"{case},phase=backward" for case in COUNTING)])
def test_a_replacement_counts_on_where_the_lost_rank_had_counted_to(replaced: Replaced, case: str) -> None:
    """What a loop runs over may count for itself."""
    manner, _, moment = case.partition(": ")
    replaced(f"counting_iterators.py --manner {manner}: kill:rank=1,{moment}")


def test_an_optimizer_that_calls_its_closure_several_times_is_refused_at_its_first_step_with_the_reason(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    result = run_ttprun("closure_steps.py", 2)

    assert_same_outcome(result, undisturbed("closure_steps.py", 2))
    assert_survivors_kept_their_pids(result)
    reasons = [event["reason"] for event in result.events if event["event"] == "rank_unprotected"]
    assert any("calls its closure several times" in reason for reason in reasons), result.story()
