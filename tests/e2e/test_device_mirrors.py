"""FSDP2 on a device: what one rank alone holds is mirrored in memory of the node, and a lost rank loses no step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import forms
from tests.e2e.harness import SCRIPTS, RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

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


@pytest.mark.parametrize(
    ("kind", "phases", "spread", "optimizer"),
    [
        ("nccl", "backward in_step", "fsdp1", "adamw"),
        ("hccl", "forward after_step", "fsdp1", "adamw"),
        ("hccl", "collective before_step", "fsdp1 original", "adamw"),
        ("nccl", "forward after_step", "fsdp1 original", "adamw"),
        ("nccl", "collective before_step", "ddp", "zero"),
        ("hccl", "backward in_step", "ddp", "zero"),
        ("nccl", "backward in_step", "fsdp1 hybrid", "adamw"),
        ("nccl", "collective before_step", "fsdp2 tp", "adamw"),
        ("nccl", "forward after_step", "fsdp1 tp", "adamw"),
        ("nccl", "backward in_step", "tp", "adamw"),
        ("hccl", "collective before_step", "tp", "adamw"),
    ],
)
def test_what_one_rank_alone_holds_on_a_device_is_had_again_in_each_layout(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    phases: str,
    spread: str,
    optimizer: str,
) -> None:
    """Tensor parallel has no replicas here."""
    first, second = phases.split()
    row = forms.row_of(spread=spread, optimizer=optimizer, device="npu", first=first, second=second)
    script, ranks, kills = forms.write(row, tmp_path / "script")
    ranks = 2 if spread == "tp" else ranks
    reference = undisturbed(script, ranks, device="npu")
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)

    run = run_ttprun(script, ranks, faults=kills, device="npu")

    assert_only_replaced(run, incidents=2)
    assert_same_outcome(run, reference)


@pytest.mark.parametrize(("kind", "phases"), [("nccl", "backward in_step"), ("hccl", "collective before_step")])
def test_experts_with_one_holder_on_a_device_are_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, kind: str, phases: str
) -> None:
    arguments, script = ["--steps=12"], "mixture_of_experts.py"
    reference = undisturbed(script, 2, arguments, device="npu")
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)
    faults = [f"kill:rank={at},step={4 + 4 * at},phase={phase}" for at, phase in enumerate(phases.split())]

    run = run_ttprun(script, 2, script_args=arguments, faults=faults, device="npu")

    assert_only_replaced(run, incidents=2)
    assert_same_outcome(run, reference)


@pytest.mark.parametrize("kind", ["hccl", "nccl"])
def test_a_rank_that_is_lost_twice_while_its_mirror_is_written_loses_no_step(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """The device is busy for a second behind the step, before which the copy cannot end."""
    script, begins = tmp_path / "is_busy.py", "data = TensorDataset("
    busy = "optimizer.register_step_post_hook(lambda *_: torch.npu._sleep(1000) if done in (8, 9) else None)"
    script.write_text((SCRIPTS / SCRIPT).read_text().replace(begins, f"{busy}\n{begins}"))
    reference = undisturbed(SCRIPT, 2, script_args=ARGUMENTS, device="npu")
    monkeypatch.setenv("SIMULATED_NPU_KIND", kind)
    faults = ["kill:rank=1,step=8,phase=after_step", "kill:rank=1,step=9,phase=after_step"]

    run = run_ttprun(str(script), 2, faults=faults, script_args=ARGUMENTS, device="npu")

    assert_only_replaced(run, incidents=2)
    assert_same_outcome(run, reference)


def test_the_host_waits_for_fsdp2_where_the_device_has_other_work(
    run_ttprun: RunTtprun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step's 27 waits some 5 are left in which the device idles; as many as in a model of half as many layers."""
    monkeypatch.setenv("SIMULATED_NPU_KIND", "nccl")
    monkeypatch.setenv("SIMULATED_NPU_TIMES", "all_gather=10,reduce_scatter=20,allreduce=20")
    arguments = ["--layout=fsdp2", "--blocks=8", "--steps=12", "--width=32", "--with=long"]

    result = run_ttprun(SCRIPT, 2, script_args=arguments, device="npu")

    waits, steps = map(int, re.findall(r"(\d+) exposed waits in (\d+) steps", "".join(result.stdout[0]))[0])
    assert waits <= 10 * steps, result.story()
