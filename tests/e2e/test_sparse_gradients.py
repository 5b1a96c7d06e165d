"""Gradients that are sparse tensors: an embedding's, which hold the rows that a batch has met."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SPARSE = "sparse_gradients.py"  # 24 iterations, of one or two steps each


@pytest.mark.parametrize(
    ("script_args", "faults"),
    [
        (["--optimizer=sparse-adam"], ["kill:rank=1,step=9,phase=backward", "kill:rank=0,step=20,phase=forward"]),
        (
            ["--optimizer=sgd", "--by-hand"],
            ["kill:rank=1,step=5,phase=collective", "kill:rank=0,step=9,phase=before_step"],
        ),
    ],
)
def test_a_rank_whose_gradients_are_sparse_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script_args: list[str], faults: list[str]
) -> None:
    result = run_ttprun(SPARSE, 2, faults=faults, script_args=script_args)

    assert_only_replaced(result, incidents=len(faults))
    assert_same_outcome(result, undisturbed(SPARSE, 2, script_args))


def test_sparse_state_of_an_optimizer_is_refused_at_its_first_step_with_the_reason(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(SPARSE, 2, script_args=["--optimizer=momentum"])

    assert result.exit_code == 0, result.story()
    reasons = [event["reason"] for event in result.events if event["event"] == "rank_unprotected"]
    assert any("momentum_buffer" in reason for reason in reasons), result.story()
