"""A replacement goes through a set of texts in the lost rank's order, which Python draws anew for each process."""

from __future__ import annotations

from tests.e2e.harness import RunTtprun, assert_only_replaced, assert_same_outcome

SCRIPT = "vocabulary.py"


def test_the_rank_that_has_made_a_vocabulary_of_a_set_is_replaced(run_ttprun: RunTtprun) -> None:
    undisturbed = run_ttprun(SCRIPT, 2)
    run = run_ttprun(SCRIPT, 2, faults=["kill:rank=0,step=11,phase=backward"])

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed)
    assert [line for line in run.stdout[0] if line.endswith("seed None")], run.story()
