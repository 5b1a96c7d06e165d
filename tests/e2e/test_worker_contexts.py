"""Workers of a DataLoader that are not forked from their rank draw the same numbers in a replacement."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "worker_contexts.py"  # 12 steps an epoch


@pytest.mark.parametrize(
    ("context", "step"),
    [
        ("forkserver", 8),
        ("spawn", 17),
        ("forkserver --persistent", 17),
        ("spawn --persistent", 8),
        ("fork --persistent --stateful", 17),
        ("spawn --persistent --stateful", 17),
    ],
)
def test_a_replacements_workers_draw_what_those_of_the_lost_rank_would_have_drawn(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, context: str, step: int
) -> None:
    if "--stateful" in context:
        pytest.importorskip("torchdata")
    args = ["--context", *context.split()]
    result = run_ttprun(SCRIPT, 2, faults=[f"kill:rank=1,step={step},phase=backward"], script_args=args)

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(SCRIPT, 2, script_args=args))
