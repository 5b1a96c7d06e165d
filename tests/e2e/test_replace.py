"""A killed rank is replaced in the middle of a step, and nothing is lost: scenarios A1 to A5, A18, A21, A31 and A32.

Steps are counted in optimizer steps: step N lies between boundary N and boundary N+1. The scripts are in tests/scripts;
their sizes, for choosing moments:

    epochs_dataloader.py         14 steps an epoch, 3 epochs; validation and checkpoint in steps 14, 28 and 42
    while_true_get_batch.py      40 steps of 3 micro-steps; rank 0 evaluates in steps 0, 10, 20 and 30
    trainer_class.py             12 steps an epoch, 4 epochs; snapshot in steps 12, 24, 36 and 48
    iter_next_two_optimizers.py  48 steps, two an iteration (first discriminator); a new iterator in steps 20 and 40
    plain_tensors.py             40 steps
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.e2e.harness import (
    EPOCHS,
    PLAIN,
    TRAINER,
    TWO_OPTIMIZERS,
    WHILE_TRUE,
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_no_orphans,
    assert_only_replaced,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

ONE_KILL = [
    # script, ranks, rank that is lost, step, phase
    (EPOCHS, 3, 0, 20, "backward"),
    (EPOCHS, 3, 1, 14, "validation"),
    (EPOCHS, 3, 0, 28, "checkpoint"),
    (TWO_OPTIMIZERS, 2, 0, 22, "backward"),  # the second iterator
    (PLAIN, 4, 2, 10, "collective"),  # a survivor is not next to the lost rank
]

EARLY_KILL = [
    # script, ranks, rank that is lost, phase
    (EPOCHS, 3, 1, "start"),
    (WHILE_TRUE, 2, 0, "init"),
    (TRAINER, 3, 2, "setup"),
]


def assert_replaced(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    script: str,
    ranks: int,
    faults: Sequence[str],
    options: Sequence[str] = (),
) -> None:
    """After each fault the lost rank is replaced, no other one is disturbed, and nothing differs."""
    result = run_ttprun(script, ranks, faults=faults, options=options)

    assert_only_replaced(result, incidents=len(faults))
    assert_same_outcome(result, undisturbed(script, ranks))
    assert_survivors_kept_their_pids(result)


@pytest.mark.parametrize(("script", "ranks"), [(EPOCHS, 3)])
def test_a_run_in_which_nothing_fails_is_as_under_torchrun(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, ranks: int
) -> None:
    result = run_ttprun(script, ranks, options=["--standalone"])

    assert_same_outcome(result, undisturbed(script, ranks, by_torchrun=True))
    assert_survivors_kept_their_pids(result)
    assert result.incidents == []
    assert result.status["state"] == "done"


@pytest.mark.parametrize(("script", "ranks", "rank", "step", "phase"), ONE_KILL)
def test_a_rank_killed_in_any_phase_of_a_step_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, ranks: int, rank: int, step: int, phase: str
) -> None:
    assert_replaced(run_ttprun, undisturbed, script, ranks, [f"kill:rank={rank},step={step},phase={phase}"])


@pytest.mark.parametrize(("script", "ranks", "rank", "phase"), EARLY_KILL)
def test_a_rank_killed_before_its_first_step_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, ranks: int, rank: int, phase: str
) -> None:
    assert_replaced(run_ttprun, undisturbed, script, ranks, [f"kill:rank={rank},phase={phase}"])


def test_a_rank_is_replaced_without_a_standby(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    assert_replaced(
        run_ttprun, undisturbed, WHILE_TRUE, 2, ["kill:rank=1,step=12,phase=backward"], options=["--standbys", "0"]
    )


def test_three_ranks_killed_one_after_the_other_are_each_replaced(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults = [
        "kill:rank=1,step=4,phase=backward",
        "kill:rank=0,step=19,phase=collective",
        "kill:rank=2,step=35,phase=after_step",
    ]

    assert_replaced(run_ttprun, undisturbed, EPOCHS, 3, faults)


@pytest.mark.parametrize("phase", ["replay", "transfer"])
def test_a_replacement_that_is_killed_in_its_turn_is_replaced_too(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str
) -> None:
    faults = ["kill:rank=1,step=9,phase=forward", f"kill:rank=1,phase={phase}"]

    result = run_ttprun(WHILE_TRUE, 2, faults=faults)

    assert_only_replaced(result)
    assert result.incidents[0]["ranks"] == [1]
    assert_same_outcome(result, undisturbed(WHILE_TRUE, 2))
    assert_survivors_kept_their_pids(result)


def test_a_rank_that_leaves_early_with_code_0_is_no_fault(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    result = run_ttprun("early_exit.py", 3)

    assert_same_outcome(result, undisturbed("early_exit.py", 3))
    assert result.incidents == []


def test_a_script_that_cannot_be_replayed_falls_back_with_a_reason(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(
        "unreplayable.py", 2, faults=["kill:rank=1,step=15,phase=collective"], options=["--max-restarts", "1"]
    )

    assert result.exit_code == 0
    assert [incident["rung"] for incident in result.incidents] == ["restart"]
    assert result.incidents[0]["outcome"] == "restarted"
    assert result.incidents[0]["reason"]


def test_a_program_with_nothing_to_recover_simply_runs(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    result = run_ttprun("no_group.py", 2)

    assert_same_outcome(result, undisturbed("no_group.py", 2, by_torchrun=True))


def test_five_thousand_short_steps_do_not_grow_a_rank(run_ttprun: RunTtprun) -> None:
    result = run_ttprun("hot_loop.py", 2)
    start, end = [line for line in result.stderr[1] if "rss_mib" in line]

    assert result.exit_code == 0
    assert _number(end, "rss_mib") - _number(start, "rss_mib") < 8.0
    assert _number(end, "fds") == _number(start, "fds")


def test_nothing_of_a_run_outlives_its_killed_agent(start_ttprun: StartTtprun) -> None:
    launch = start_ttprun(EPOCHS, 3, script_args=["--epochs", "100"])
    launch.wait_for_line(0, "step 3 ")

    launch.kill_agent()

    assert_no_orphans(launch.finish())


def _number(line: str, name: str) -> float:
    """The number that follows a name."""
    found = re.search(rf"{name} ([\d.]+)", line)
    assert found, line
    return float(found[1])
