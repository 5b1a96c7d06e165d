"""FSDP2 on a device: what one rank alone holds is mirrored in memory of the node, and a lost rank loses no step."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_same_outcome

SCRIPT = "device_layouts.py"
ARGUMENTS = ["--layout=fsdp2", "--blocks=3", "--steps=16"]


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        ("hccl", ["kill:rank=1,step=8,phase=backward"]),
        ("hccl", ["uce-high:rank=1,step=6,phase=forward", "kill:rank=0,step=11,phase=in_step"]),
        ("nccl", ["kill:rank=1,step=8,phase=backward", "kill:rank=0,step=11,phase=collective"]),
        ("nccl", ["kill:rank=1,step=3,phase=in_step", "kill:rank=1,step=3,phase=transfer"]),
        ("nccl", ["kill:rank=0,step=9,phase=forward", "kill:rank=1,step=9,phase=before_step"]),
    ],
)
def test_a_rank_of_fsdp2_on_a_device_is_replaced_from_its_mirror_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, kind: str, faults: list[str]
) -> None:
    reference = undisturbed(SCRIPT, 2, script_args=ARGUMENTS, device="npu")
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)

    result = run_ttprun(SCRIPT, 2, faults=faults, script_args=ARGUMENTS, device="npu")

    assert_same_outcome(result, reference)
    answers = {(incident["outcome"], incident["steps_lost"]) for incident in result.incidents}
    assert answers == {("recovered", 0)}, result.story()
