"""A model on an accelerator (the tests' simulated NPU) is repaired as on the CPU: bit for bit, and nothing is lost."""

from __future__ import annotations

import pytest

from tests.e2e.harness import (
    RunTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

SCRIPT = "on_device.py"
NPU = "npu"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "kill:rank=1,step=12,phase=backward"),
        (["--by-hand", "--backend", "cpu:gloo,npu:hccl", "--with", "groups"], "kill:rank=1,step=12,phase=collective"),
        (["--with", "graphs,batchnorm"], "kill:rank=1,step=12,phase=backward"),
        (["--by-hand", "--with", "whole,batchnorm"], "kill:rank=1,step=12,phase=collective"),
    ],
)
def test_a_rank_with_tensors_on_a_device_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, arguments: list[str], fault: str
) -> None:
    reference = undisturbed(SCRIPT, 2, arguments, device=NPU)

    result = run_ttprun(SCRIPT, 2, script_args=arguments, faults=[fault], device=NPU)

    assert_same_outcome(result, reference)
    assert_only_replaced(result)
    assert_survivors_kept_their_pids(result)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("batchnorm,dropout", "stop:rank=2,step=9,phase=forward"),
    ],
)
def test_one_of_four_ranks_that_is_lost_or_hangs_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, more: str, fault: str
) -> None:
    arguments = ["--with", more]
    reference = undisturbed(SCRIPT, 4, arguments, device=NPU)

    result = run_ttprun(SCRIPT, 4, script_args=arguments, faults=[fault], options=["--hang-timeout", "6"], device=NPU)

    assert_same_outcome(result, reference)
    assert_only_replaced(result)
    assert_survivors_kept_their_pids(result)


@pytest.mark.parametrize("second", ["connect", "rebuild"])
def test_a_second_rank_that_is_lost_while_the_first_is_repaired_is_replaced_too(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, second: str
) -> None:
    arguments = ["--with", "batchnorm,dropout,groups", "--by-hand"]
    reference = undisturbed(SCRIPT, 3, arguments, device=NPU)

    faults = ["kill:rank=1,step=9,phase=collective", f"kill:rank=0,phase={second}"]
    result = run_ttprun(SCRIPT, 3, script_args=arguments, faults=faults, device=NPU)

    assert_same_outcome(result, reference)
    assert_only_replaced(result)
    assert result.incidents[0]["ranks"] == [1, 0], result.story()
    assert_survivors_kept_their_pids(result)


@pytest.mark.parametrize("second", [0, 1])
def test_either_end_of_a_transfer_that_is_killed_in_it_is_replaced_too(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, second: int
) -> None:
    """Copies to and from registered memory end late there, as with CUDA."""
    reference = undisturbed(SCRIPT, 3, device=NPU)
    monkeypatch.setenv("SIMULATED_NPU_KIND", "nccl")

    faults = ["kill:rank=1,step=9,phase=backward", f"kill:rank={second},phase=transfer"]
    result = run_ttprun(SCRIPT, 3, faults=faults, device=NPU)

    assert_same_outcome(result, reference)
    assert_only_replaced(result)
    assert result.incidents[0]["ranks"] == sorted({1, second}, reverse=True), result.story()
