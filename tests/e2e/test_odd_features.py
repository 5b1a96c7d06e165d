"""What few scripts use of torch.distributed: a lost rank is replaced, and nothing differs."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

ODD = "odd_features.py"  # 16 steps


@pytest.mark.parametrize(
    ("what", "rank", "step", "phase"),
    [
        ("objects", 1, 8, "backward"),
        ("coalesced", 1, 8, "backward"),
        ("async_over_step", 1, 8, "backward"),
        ("monitored_barrier", 1, 8, "backward"),
        ("fp16_compress", 1, 8, "backward"),
        ("powersgd", 1, 8, "backward"),
        ("static_graph", 1, 8, "backward"),
        ("unused", 1, 8, "backward"),
        ("checkpointing", 1, 8, "backward"),
    ],
)
def test_a_rank_whose_script_uses_it_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, what: str, rank: int, step: int, phase: str
) -> None:
    arguments = ["--what", what]

    run = run_ttprun(ODD, 2, script_args=arguments, faults=[f"kill:rank={rank},step={step},phase={phase}"])

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed(ODD, 2, arguments))
