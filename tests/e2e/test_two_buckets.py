"""Small collectives of one line that have as many bytes: a replay answers each by its own result."""

from __future__ import annotations

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome


def test_ddp_with_two_buckets_and_a_batch_norm_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    reference = undisturbed("two_buckets.py", 2)

    result = run_ttprun("two_buckets.py", 2, faults=["kill:rank=1,step=6,phase=backward"])

    assert_same_outcome(result, reference)
    assert_only_replaced(result)
