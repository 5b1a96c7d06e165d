"""FSDP2 on a device: what one rank alone holds is mirrored in memory of the node, and a lost rank loses no step."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_recovered_by, assert_same_outcome

SCRIPT = "device_layouts.py"
ARGUMENTS = ["--layout=fsdp2"]


@pytest.mark.parametrize(
    ("rank", "step", "phase"), [(1, 8, "backward"), (0, 13, "collective"), (1, 3, "in_step"), (0, 9, "forward")]
)
def test_a_rank_of_fsdp2_on_a_device_is_replaced_from_its_mirror_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, rank: int, step: int, phase: str
) -> None:
    reference = undisturbed(SCRIPT, 2, script_args=ARGUMENTS, device="npu")

    result = run_ttprun(
        SCRIPT, 2, faults=[f"kill:rank={rank},step={step},phase={phase}"], script_args=ARGUMENTS, device="npu"
    )

    assert_recovered_by(result, ["replace"])
    assert_same_outcome(result, reference)
