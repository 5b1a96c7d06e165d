"""What scripts do on an accelerator, in each layout: DDP with all its company, gradients by hand, FSDP2, HSDP.

The simulated NPU is at least as strict as real ones: csrc/kind.h has its exceptions.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import (
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

SCRIPT = "device_layouts.py"
NPU = "npu"


def arguments_of(layout: str, more: str = "") -> list[str]:
    return ["--layout", layout, "--with", more, "--steps", "14", "--width", "32"]


@pytest.mark.parametrize(("every", "most"), [("auto", 8), ("3steps", 3)])
def test_a_rank_whose_shards_nobody_else_has_sends_all_back_to_a_snapshot_and_the_weights_are_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, every: str, most: int
) -> None:
    arguments = arguments_of("fsdp2", "barrier,loss")
    reference = undisturbed(SCRIPT, 2, arguments, device=NPU)

    fault, options = "kill:rank=1,step=8,phase=backward", ["--buddy", "off", "--snapshot-every", every]
    result = run_ttprun(SCRIPT, 2, script_args=arguments, faults=[fault], options=options, device=NPU)

    assert [(one["rung"], one["outcome"]) for one in result.incidents] == [("rewind", "recovered")], result.story()
    assert 0 < result.incidents[0]["steps_lost"] <= most, result.story()
    assert (result.exit_code, result.final, result.hashes) == (0, reference.final, reference.hashes), result.story()


@pytest.mark.parametrize("hook", ["powersgd", "halves"])
def test_a_hook_of_ddp_issues_its_collectives_in_one_order_and_two_losses_are_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """Under torchrun PowerSGD is other from run to run on the simulated NPU: its callbacks' streams race for memory."""
    monkeypatch.setenv("SIMULATED_NPU_KIND", "nccl")
    arguments = arguments_of("ddp", hook)
    alone: dict[str, Any] = {"script_args": arguments, "device": NPU}
    reference = run_ttprun(SCRIPT, 2, **alone) if hook == "powersgd" else undisturbed(SCRIPT, 2, arguments, device=NPU)
    assert reference.exit_code == 0, reference.story()

    faults = ["kill:rank=1,step=5,phase=backward", "kill:rank=0,step=9,phase=collective"]
    result = run_ttprun(SCRIPT, 2, faults=faults, **alone)

    assert_same_outcome(result, reference)
    assert_only_replaced(result, incidents=2)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("ddp", "nccl,gate"), ("ddp", "nccl,gate,load"), ("ddp", "nccl,load,lock,null"), ("fsdp2", "nccl,gate,load")],
)
def test_a_recovery_needs_no_stream_of_the_scripts_and_launches_no_kernel_for_the_first_time(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, layout: str, kind: str
) -> None:
    """A survivor's own stream is blocked from the abort until the operation has been issued again."""
    arguments = ["--layout", layout, "--with", "loss", "--steps", "14", "--blocks", "2"]
    reference = undisturbed(SCRIPT, 2, arguments, device=NPU)
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)

    fault, options = "stop:rank=1,step=8,phase=backward", ["--hang-timeout", "6"]  # the other waits for it by then
    result = run_ttprun(SCRIPT, 2, script_args=arguments, faults=[fault], options=options, device=NPU)

    assert_same_outcome(result, reference)
    assert_only_replaced(result)
    assert_survivors_kept_their_pids(result)


def test_a_standby_with_a_context_on_the_lost_ranks_device_takes_its_place_and_nothing_differs(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Twice: the second one has a context made after the first was taken."""
    arguments, gate = arguments_of("ddp", "loss,pool"), tmp_path / "gate"
    more, options = [*arguments, "--gate", str(gate)], ["--standby-context"]
    launch = start_ttprun(SCRIPT, 2, script_args=more, options=options, device=NPU)
    assert launch.run_dir is not None
    for _ in range(2):
        launch.wait_for_standby("2 device contexts (made in ")
        os.kill(launch.wait_for_rank(1, state="running", step=11)["pid"], signal.SIGKILL)
        launch.wait_for_event("rank_replayed", rank=1)
    gate.touch()

    result = launch.finish()

    assert_same_outcome(result, undisturbed(SCRIPT, 2, arguments, device=NPU))
    made = [event for event in result.events if event["event"] == "standby_context" and event["rank"] == 1]
    assert result.pids[1][1:] == [event["pid"] for event in made[:2] if event["took_s"] > 0], result.story()
