"""Adapters on frozen weights, averages of weights, and trl's trainers: a lost rank is replaced, and all is the same.

The extra `test-frameworks` has peft, the extra `test-more-frameworks` trl (with `datasets`, which is large): cases are
skipped where a package is missing. All cases: ./scripts/test.sh -m 'slow or not slow' with this file.
"""

from __future__ import annotations

import pytest

from tests.e2e.cases import needs
from tests.e2e.harness import RunTtprun, Undisturbed
from tests.e2e.test_frameworks import assert_replaced_and_the_same

LORA = "frameworks/peft_lora.py"  # 20 steps in 2 epochs
TRL = "frameworks/trl_trainer.py"  # 10 steps in 2 epochs


@needs("peft")
@pytest.mark.parametrize(
    "case",
    [
        "--save: kill:rank=1,step=13,phase=backward",
    ],
)
def test_a_rank_that_trains_adapters_on_frozen_weights_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_replaced_and_the_same(run_ttprun, undisturbed, LORA, case)


@needs("trl", "test-more-frameworks")
@pytest.mark.parametrize(
    "case",
    [
        "--save --evaluate: kill:rank=1,step=9,phase=backward",
        "--method dpo --save --evaluate: kill:rank=1,step=9,phase=backward",
    ],
)
def test_a_rank_of_a_trainer_of_trl_is_replaced_and_its_checkpoints_and_logs_are_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_replaced_and_the_same(run_ttprun, undisturbed, TRL, case)
