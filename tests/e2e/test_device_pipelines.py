"""Pipelines and rings on a device: no message is lost or doubled when a rank is replaced."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

BY_HAND = "device_pipeline.py"
SCHEDULES = "pipeline_schedules.py"
RING = "context_parallel.py"


@pytest.mark.parametrize(
    ("kind", "arguments", "faults"),
    [
        ("nccl", [], ["kill:rank=1,step=5,phase=backward", "kill:rank=2,step=8,phase=forward"]),
        ("hccl", [], ["kill:rank=0,step=5,phase=forward", "kill:rank=3,step=8,phase=collective"]),
        ("nccl", ["--device-id"], ["kill:rank=0,step=5,phase=backward"]),
        ("nccl", ["--together"], ["kill:rank=1,step=5,phase=collective", "kill:rank=2,step=8,phase=backward"]),
        ("hccl", ["--together"], ["kill:rank=0,step=5,phase=collective", "kill:rank=3,step=8,phase=forward"]),
    ],
)
def test_a_rank_of_a_pipeline_by_hand_on_a_device_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    arguments: list[str],
    faults: list[str],
) -> None:
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)
    reference = undisturbed(BY_HAND, 4, arguments, device="npu")

    result = run_ttprun(BY_HAND, 4, script_args=arguments, faults=faults, device="npu")

    assert_same_outcome(result, reference)
    assert_only_replaced(result, len(faults))


def test_a_rank_of_a_pipeline_that_hangs_is_found_though_no_collective_of_all_ranks_tells_them_apart(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults, options = ["sleep:rank=3,step=6,phase=backward"], ["--hang-timeout-s", "6"]

    result = run_ttprun(BY_HAND, 4, faults=faults, options=options, device="npu")

    assert_same_outcome(result, undisturbed(BY_HAND, 4, device="npu"))
    assert_only_replaced(result)


@pytest.mark.parametrize(
    ("kind", "schedule", "fault"),
    [
        ("nccl", "1F1B", "kill:rank=1,step=5,phase=collective"),
        ("hccl", "GPipe", "kill:rank=2,step=5,phase=backward"),
    ],
)
def test_a_rank_in_a_schedule_of_torch_s_own_on_a_device_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    schedule: str,
    fault: str,
) -> None:
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)
    arguments = ["--schedule", schedule, "--backend", "hccl"]
    reference = undisturbed(SCHEDULES, 4, arguments, device="npu")

    result = run_ttprun(SCHEDULES, 4, script_args=arguments, faults=[fault], device="npu")

    assert_same_outcome(result, reference)
    assert_only_replaced(result)


@pytest.mark.parametrize(
    ("kind", "arguments", "faults"),
    [
        ("nccl", [], ["kill:rank=1,step=5,phase=backward", "kill:rank=0,step=9,phase=before_step"]),
        ("hccl", ["--coalesce"], ["kill:rank=1,step=5,phase=collective", "kill:rank=1,step=9,phase=in_step"]),
    ],
)
def test_a_rank_of_a_ring_on_a_device_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    arguments: list[str],
    faults: list[str],
) -> None:
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)
    words = [*arguments, "--backend", "hccl", "--steps", "12"]
    reference = undisturbed(RING, 2, words, device="npu")

    result = run_ttprun(RING, 2, script_args=words, faults=faults, device="npu")

    assert_same_outcome(result, reference)
    assert_only_replaced(result, len(faults))
