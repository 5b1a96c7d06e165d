"""Pipelines on a device: messages between ranks are neither lost nor doubled when one of them is replaced."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

BY_HAND = "device_pipeline.py"


@pytest.mark.parametrize(
    ("kind", "arguments", "faults"),
    [
        ("nccl", [], ["kill:rank=1,step=5,phase=backward", "kill:rank=2,step=8,phase=forward"]),
        ("hccl", [], ["kill:rank=0,step=5,phase=forward", "kill:rank=3,step=8,phase=collective"]),
        ("nccl", ["--device-id"], ["kill:rank=0,step=5,phase=backward"]),
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
