"""What few scripts use, most of it of torch.distributed: a lost rank is replaced, and nothing differs."""

from __future__ import annotations

import pytest

from tests.e2e.cases import recovered_and_undisturbed
from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

ODD = "odd_features.py"  # 16 steps
KILL = "kill:rank=1,step=8,phase=backward"
WHAT = (
    "objects",
    "coalesced",
    "async_over_step",
    "subgroups",
)


@pytest.mark.parametrize("case", [f"--what {what}: {KILL}" for what in WHAT])
def test_a_rank_whose_script_uses_it_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_same_outcome(*recovered_and_undisturbed(run_ttprun, undisturbed, ODD, case))
