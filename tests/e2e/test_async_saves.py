"""Threads that communicate beside the training: checkpoints of dcp.async_save, and a metric, scenario A65.

A rank is replaced beside a save, or the one save is given up. What a thread has got, the replacement's gets.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "async_save.py"  # saves after steps 5, 11, 17, 23 and 29
GIVEN_UP = "the checkpoint that dcp.async_save was writing"


@pytest.mark.parametrize("kill", ["kill:rank=1,step=12,phase=backward"])
def test_a_rank_that_is_lost_beside_no_older_save_is_replaced_and_all_checkpoints_are_whole(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, kill: str
) -> None:
    result = run_ttprun(SCRIPT, 2, faults=[kill])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(SCRIPT, 2))
    whole = sorted(int(found.parent.name) for found in result.folder.glob("out/checkpoints/*/.metadata"))
    assert whole == [5, 11, 17, 23, 29]


@pytest.mark.parametrize("rank", [1])
def test_a_save_that_is_open_when_a_rank_is_lost_is_given_up_and_the_script_goes_on(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, rank: int
) -> None:
    args = ["--open", "11:20"]
    result = run_ttprun(SCRIPT, 2, faults=[f"kill:rank={rank},step=15,phase=forward"], script_args=args)

    assert_only_replaced(result)
    expected = undisturbed(SCRIPT, 2)
    assert (result.hashes, result.stdout, result.exit_code) == (expected.hashes, expected.stdout, 0), result.story()
    assert GIVEN_UP in result.output
    whole = sorted(int(found.parent.name) for found in result.folder.glob("out/checkpoints/*/.metadata"))
    assert whole == [5, 17, 23, 29]


@pytest.mark.parametrize("place", ["step=11,phase=in_step"])
def test_a_thread_of_a_replacement_gets_the_results_that_the_lost_ranks_thread_had(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, place: str
) -> None:
    """Or the incident names the operation: the lost rank may die between the others' result and its own."""
    result = run_ttprun("thread_metric.py", 2, faults=[f"kill:rank=0,{place}"])

    assert_only_replaced(result)
    expected = undisturbed("thread_metric.py", 2)
    assert (result.hashes, result.exit_code) == (expected.hashes, 0), result.story()
    is_named = "allreduce of thread" in " ".join(result.incidents[0]["not_proved"])
    assert is_named or result.stdout == expected.stdout, result.story()
    assert result.stdout[1] == expected.stdout[1], result.story()
