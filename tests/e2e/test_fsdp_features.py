"""What scripts use together with FSDP2: a rank that alone holds its shards is replaced, and nothing differs."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_recovered_by, assert_same_outcome
from ttprun import torch_versions

pytestmark = pytest.mark.skipif(
    torch_versions.release_of(torch.__version__) < (2, 7),
    reason="torch 2.6 itself cannot run fully_shard on the processor (CPU streams without record_event)",
)

FEATURES = "fsdp_features.py"  # 20 steps
KILLS = ["kill:rank=1,step=7,phase=backward", "kill:rank=0,step=13,phase=in_step"]


@pytest.mark.parametrize(
    "feature",
    [
        "accumulation",
        "bf16",
        "checkpointing",
        "clip",
        "compile",
        "dcp",
        "ema",
        "freeze",
        "keep_gathered",
        "prefetch",
        "unfreeze",
        "workers",
    ],
)
def test_a_rank_that_uses_it_is_replaced_from_its_mirror_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, feature: str
) -> None:
    arguments = ["--feature", feature]

    run = run_ttprun(FEATURES, 2, script_args=arguments, faults=KILLS)

    assert_only_replaced(run, incidents=2)
    assert_same_outcome(run, undisturbed(FEATURES, 2, arguments))


def test_a_transient_error_is_answered_in_the_same_process_from_the_mirror_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    options = ["--retry-on", "InjectedFaultError"]

    run = run_ttprun(FEATURES, 2, faults=["exception:rank=0,step=9,phase=forward"], options=options)

    assert_recovered_by(run, ["rerun"])
    assert_same_outcome(run, undisturbed(FEATURES, 2))


def test_with_replicas_times_shards_times_tensor_parallelism_ranks_are_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    arguments = ["--feature", "three_d", "--steps", "12"]
    moments = [(3, 4, "backward"), (6, 7, "in_step"), (0, 9, "collective")]

    run = run_ttprun(
        FEATURES, 8, script_args=arguments, faults=[f"kill:rank={r},step={s},phase={p}" for r, s, p in moments]
    )

    assert_only_replaced(run, incidents=3)
    assert_same_outcome(run, undisturbed(FEATURES, 8, arguments))
