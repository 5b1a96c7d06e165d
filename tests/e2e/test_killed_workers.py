"""A DataLoader worker is killed, as by the kernel when memory is short, scenario A43: the rank fails at its own call.

Under torchrun each of these ends the job. Here the rank is replaced, and so is one that is lost later.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

WORKERS = "loses_a_worker.py"  # 16 steps; it dies in step 5
LATER = "kill:rank=1,step=11,phase=backward"


@pytest.mark.parametrize("place", ["backward", "next"])
def test_a_rank_whose_loaders_worker_is_killed_is_replaced_and_protection_stays_on(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, place: str
) -> None:
    run = run_ttprun(WORKERS, 2, faults=[LATER], script_args=["--place", place])

    # The script kills a worker again where a replacement is answered as its rank was, maybe some steps later.
    assert_only_replaced(run, incidents=max(2, len(run.incidents)))
    assert "DataLoader worker" in "\n".join(run.stderr[0]), run.story()
    assert [event["reason"] for event in run.events if event["event"] == "unprotected"] == [], run.story()
    assert_same_outcome(run, undisturbed(WORKERS, 2))


def test_a_worker_that_is_killed_in_a_replay_costs_another_replacement(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults = ["kill:rank=0,step=8,phase=backward", LATER]

    run = run_ttprun(WORKERS, 2, faults=faults, script_args=["--place", "set-up"])

    assert {incident["outcome"] for incident in run.incidents} == {"recovered"}, run.story()
    assert {incident["steps_lost"] for incident in run.incidents} == {0}, run.story()
    assert_same_outcome(run, undisturbed(WORKERS, 2))
