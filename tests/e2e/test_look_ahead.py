"""Iterators that read ahead: at an epoch's end the loader has ended, and its last batch is yet to be trained on."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

LOOK_AHEAD = "look_ahead.py"  # 20 steps, 5 an epoch
# Boundaries 5, 10 and 15 end an epoch: steps before one, after it, and after the first of the next epoch.
AT_ENDS = [
    "kill:rank=1,step=4,phase=backward",
    "kill:rank=0,step=5,phase=collective",
    "kill:rank=1,step=6,phase=forward",
    "kill:rank=0,step=11,phase=backward",
    "kill:rank=1,step=14,phase=in_step",
    "kill:rank=0,step=19,phase=after_step",
]


@pytest.mark.parametrize(
    ("reader", "asked_by"),
    [
        ("shard", "next"),
        ("shard", "for"),
        ("one-behind", "next"),
        ("one-behind", "for"),
        ("fetcher", "next"),
        ("fetcher", "for"),
    ],
)
def test_a_rank_lost_around_the_end_of_an_epoch_that_is_read_ahead_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, reader: str, asked_by: str
) -> None:
    script_args = [f"--reader={reader}", f"--asked-by={asked_by}"]

    result = run_ttprun(LOOK_AHEAD, 2, faults=AT_ENDS, script_args=script_args)

    assert_only_replaced(result, incidents=len(AT_ENDS))
    assert_same_outcome(result, undisturbed(LOOK_AHEAD, 2, script_args))
