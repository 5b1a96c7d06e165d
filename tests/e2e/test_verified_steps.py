"""Steps that another process takes again (--verify-steps): a flipped bit is found, named, and taken back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import EPOCHS, Run, RunTtprun, StartTtprun, Undisturbed, assert_same_outcome

GATED = "gated_steps.py"
EVERY = 15  # the first one that is taken again, once a standby is ready, is of rank 1, the second one of rank 0
# What a bit is flipped in -> the fault, and what is found first.
CORRUPTIONS = {
    "gradient": (
        "flip-gradient:rank=0,step=30,phase=backward,seed=5",
        "the gradient of net.0.weight (input of allreduce 1)",
    ),
    "batch": ("flip-batch:rank=0,step=30,phase=forward,seed=5", "the gradient of net."),  # too little for the loss
    "weight": ("flip-bit:rank=0,step=30,phase=forward,seed=5", "loss 1"),
    "optimizer state": ("flip-state:rank=0,step=30,phase=forward,seed=5", "weights of "),
}


@pytest.fixture
def corrupted(start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path) -> Callable[..., Run]:
    """A run with a fault, in which the first verified step is equal; it has ended as one without."""

    def run(fault: str, verify_steps: str, *more: str) -> Run:
        gates = {name: tmp_path / name for name in ("gate", "second", "third")}
        options = ["--verify-steps", verify_steps, "--verify-every", "0"]
        words = [*more, *(word for name, gate in gates.items() for word in (f"--{name}", str(gate)))]
        launch = start_ttprun(GATED, 2, faults=[fault], options=options, script_args=words)
        launch.wait_for_standby("ready")
        gates["gate"].touch()
        launch.wait_for_event("step_verified", finding="equal")
        gates["second"].touch()
        launch.wait_for_event("step_verified", finding="suspect")
        gates["third"].touch()
        ended, reference = launch.finish(), undisturbed(GATED, 2, more)
        assert (ended.hashes, ended.final, ended.exit_code) == (reference.hashes, reference.final, 0), ended.story()
        return ended

    return run


@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("where", CORRUPTIONS)
def test_a_flipped_bit_is_found_by_two_other_processes_and_the_weights_are_those_of_an_undisturbed_run(
    where: str, is_sticky: bool, corrupted: Callable[..., Run]
) -> None:
    fault, named = CORRUPTIONS[where]

    run = corrupted(f"{fault},sticky=1" if is_sticky else fault, f"1/{EVERY}")

    (incident,) = run.incidents
    assert (incident["kind"], incident["ranks"], incident["rung"]) == ("corruption", [0], "rewind"), run.story()
    assert incident["outcome"] == "recovered", run.story()
    (verified,) = (event for event in run.events if event["event"] == "step_verified" and event["finding"] == "suspect")
    assert (verified["rank"], verified["step"]) == (0, 2 * EVERY), run.story()
    assert verified["what"].startswith(named), run.story()
    assert "rank 0 is suspect: it has computed" in run.output, run.story()


@pytest.mark.parametrize(
    ("fault", "named", "more"),
    [
        (*CORRUPTIONS["gradient"], ()),
        ("flip-bit:rank=0,step=30,phase=backward,seed=5", "weights of net.", ()),
        (CORRUPTIONS["gradient"][0], "the gradient of net.3.weight to net.3.bias (input of", ("--sharded", "yes")),
    ],
    ids=["a gradient", "a weight, after its use", "what FSDP2 reduces"],
)
def test_if_it_is_compared_before_the_optimizer_uses_it_no_step_is_lost(
    corrupted: Callable[..., Run], fault: str, named: str, more: tuple[str, ...]
) -> None:
    run = corrupted(fault, f"1/{EVERY},before", *more)

    (incident,) = run.incidents
    assert (incident["outcome"], incident["ranks"], incident["steps_lost"]) == ("recovered", [0], 0), run.story()
    assert f"it has computed {named}" in incident["reason"], run.story()


def test_what_a_device_computes_wrongly_each_time_is_found_on_others_and_at_the_second_time_its_rank_leaves_it(
    start_ttprun: StartTtprun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6")
    gates = [str(tmp_path / name) for name in ("one", "two", "three")]
    words = ["--device", "npu", "--defective", "4", "--gate", gates[0], "--second", gates[1], "--third", gates[2]]
    options = ["--verify-steps", "1/4,before", "--verify-every", "0"]
    launch = start_ttprun(GATED, 2, options=options, script_args=words, device="npu")
    for gate in gates:
        launch.wait_for_standby("ready")
        Path(gate).touch()
    run = launch.finish()

    assert [(one["ranks"], one["outcome"]) for one in run.incidents] == [([0], "recovered")] * 2, run.story()
    assert "was suspect before" not in run.incidents[0]["reason"], run.story()
    said = "; device 4 was suspect before and is not used again: the rank uses device 6 from now on"
    assert run.incidents[1]["reason"].endswith(said), run.story()


def test_of_a_sound_run_with_dropout_and_workers_nothing_is_said_and_its_outcome_is_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    args = ["--per-rank", "1200", "--workers", "1"]  # 450 steps

    run = run_ttprun(EPOCHS, 2, options=["--verify-steps", "1/10"], script_args=args)

    verified = [event for event in run.events if event["event"] == "step_verified"]
    assert {event["rank"] for event in verified} == {0, 1}, run.story()
    assert {event["finding"] for event in verified} == {"equal"}, run.story()
    assert {event["reason"] for event in run.events if event["event"] == "step_not_verified"} <= {"no standby is ready"}
    assert "was taken again by another process, and is equal" in run.output, run.story()
    assert not run.incidents, run.story()
    assert_same_outcome(run, undisturbed(EPOCHS, 2, script_args=args))
