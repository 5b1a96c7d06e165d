"""What scripts do on an accelerator, in each layout: DDP with all its company, gradients by hand, FSDP2, HSDP.

The simulated NPU is at least as strict as real ones: csrc/kind.h has its exceptions.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import (
    RunTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

SCRIPT = "device_layouts.py"
NPU = "npu"
COMPANY = "syncbn,barrier,loss,objects"


def arguments_of(layout: str, more: str = "") -> list[str]:
    return ["--layout", layout, "--with", more, "--steps", "14", "--width", "32"]


@pytest.mark.parametrize(("layout", "ranks", "more"), [("fsdp2", 2, "barrier,loss")])
def test_without_a_fault_each_layout_comes_to_what_it_comes_to_under_torchrun(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, layout: str, ranks: int, more: str
) -> None:
    arguments = arguments_of(layout, more)
    reference = undisturbed(SCRIPT, ranks, arguments, device=NPU)

    result = run_ttprun(SCRIPT, ranks, script_args=arguments, device=NPU)

    assert_same_outcome(result, reference)
    assert not result.incidents, result.story()


@pytest.mark.parametrize(
    ("layout", "ranks", "more", "fault"),
    [
        ("ddp", 2, COMPANY, "kill:rank=1,step=8,phase=backward"),
        ("ddp", 2, f"{COMPANY},accumulation,fp16,device_id", "kill:rank=1,step=8,phase=collective"),
        ("hsdp", 4, "barrier,loss", "kill:rank=2,step=8,phase=in_step"),
    ],
)
def test_a_rank_that_is_killed_in_a_layout_with_a_replica_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, layout: str, ranks: int, more: str, fault: str
) -> None:
    arguments = arguments_of(layout, more)
    reference = undisturbed(SCRIPT, ranks, arguments, device=NPU)

    result = run_ttprun(SCRIPT, ranks, script_args=arguments, faults=[fault], device=NPU)

    assert_same_outcome(result, reference)
    assert_only_replaced(result)
    assert_survivors_kept_their_pids(result)


@pytest.mark.parametrize("phase", ["backward"])
def test_a_rank_whose_shards_nobody_else_has_sends_all_back_to_a_snapshot_and_the_weights_are_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str
) -> None:
    arguments = arguments_of("fsdp2", "barrier,loss")
    reference = undisturbed(SCRIPT, 2, arguments, device=NPU)

    result = run_ttprun(SCRIPT, 2, script_args=arguments, faults=[f"kill:rank=1,step=8,phase={phase}"], device=NPU)

    assert [(one["rung"], one["outcome"]) for one in result.incidents] == [("rewind", "recovered")], result.story()
    assert (result.exit_code, result.final, result.hashes) == (0, reference.final, reference.hashes), result.story()
