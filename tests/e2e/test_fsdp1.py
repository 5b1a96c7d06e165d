"""FullyShardedDataParallel, torch's first: a lost rank gets its part back, from its mirror or its replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome
from tests.e2e.test_checkpoints import Series, assert_resumed, assert_saved

SCRIPT = "fsdp1_model.py"  # 24 steps
TENSOR_PARALLEL = "fsdp1_tensor_parallel.py"  # 20 steps


@pytest.mark.parametrize(
    ("strategy", "ranks", "kills"),
    [
        ("FULL_SHARD", 2, ["rank=1,step=9,phase=forward", "rank=0,step=15,phase=in_step"]),
        ("FULL_SHARD", 2, ["rank=0,step=9,phase=backward", "rank=1,step=15,phase=collective"]),
        ("SHARD_GRAD_OP", 2, ["rank=1,step=9,phase=backward", "rank=0,step=15,phase=forward"]),
        ("HYBRID_SHARD", 4, ["rank=3,step=9,phase=forward", "rank=0,step=15,phase=backward"]),
        ("HYBRID_SHARD", 4, ["rank=1,step=9,phase=collective", "rank=2,step=15,phase=in_step"]),
    ],
)
def test_a_rank_of_fsdp1_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, strategy: str, ranks: int, kills: Sequence[str]
) -> None:
    arguments = ["--strategy", strategy]

    run = run_ttprun(SCRIPT, ranks, script_args=arguments, faults=[f"kill:{kill}" for kill in kills])

    assert_only_replaced(run, incidents=2)
    assert_same_outcome(run, undisturbed(SCRIPT, ranks, arguments))


@pytest.mark.parametrize(
    ("strategy", "ranks", "kills"),
    [
        (
            "FULL_SHARD",
            2,
            ["rank=0,step=9,phase=after_step", "rank=1,step=12,phase=collective", "rank=1,step=17,phase=in_step"],
        ),
        ("SHARD_GRAD_OP", 2, ["rank=1,step=9,phase=backward", "rank=0,step=15,phase=forward"]),
        ("HYBRID_SHARD", 4, ["rank=3,step=12,phase=collective", "rank=0,step=17,phase=backward"]),
    ],
)
def test_a_rank_of_fsdp1_with_original_parameters_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, strategy: str, ranks: int, kills: Sequence[str]
) -> None:
    """After steps 9, 12 and 15 the first collectives gather whole parameters in the place of the parts."""
    arguments = ["--original", "--strategy", strategy]

    run = run_ttprun(SCRIPT, ranks, script_args=arguments, faults=[f"kill:{kill}" for kill in kills])

    assert_only_replaced(run, incidents=len(kills))
    assert_same_outcome(run, undisturbed(SCRIPT, ranks, arguments))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_job_of_fsdp1_that_is_ended_in_mid_step_is_resumed_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, phase: str
) -> None:
    """Its flat parameters are the whole then; what is saved is each rank's part."""
    series = Series(run_ttprun, tmp_path, SCRIPT, 2)

    saved = series.launch([f"preempt:rank=0,step=10,phase={phase}"])
    resumed = series.launch()

    assert_saved(saved, "ended")
    assert_resumed(resumed, 10)
    assert_same_outcome(series.as_one(), undisturbed(SCRIPT, 2))


def test_a_job_of_fsdp1_with_original_parameters_that_is_ended_is_resumed_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    series = Series(run_ttprun, tmp_path, SCRIPT, 2, ["--original"])

    saved = series.launch(["preempt:rank=0,step=10,phase=backward"])
    resumed = series.launch()

    assert_saved(saved, "ended")
    assert_resumed(resumed, 10)
    assert_same_outcome(series.as_one(), undisturbed(SCRIPT, 2, ["--original"]))


@pytest.mark.parametrize("arguments", [[], ["--original"]], ids=["flat", "original"])
def test_a_rank_of_fsdp1_over_tensor_parallel_layers_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, arguments: Sequence[str]
) -> None:
    kills = ["rank=1,step=6,phase=backward", "rank=2,step=11,phase=in_step", "rank=0,step=16,phase=collective"]

    run = run_ttprun(TENSOR_PARALLEL, 4, script_args=arguments, faults=[f"kill:{kill}" for kill in kills])

    assert_only_replaced(run, incidents=len(kills))
    assert_same_outcome(run, undisturbed(TENSOR_PARALLEL, 4, arguments))
