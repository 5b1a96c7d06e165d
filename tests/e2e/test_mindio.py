"""A framework that owns its train function: its callbacks have lost ranks replaced, and failed memory filled again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import (
    REPOSITORY,
    Launch,
    Run,
    RunTtprun,
    StartTtprun,
    assert_recovered_by,
    assert_survivors_kept_their_pids,
    environment,
)

PAIR = "mindio_pair.py"
MEGATRON = "../../scripts/examples/megatron_like.py"
STEPS = ("--steps", "30")
MINDIO = ("--mindio",)


class Undisturbed:
    """What ranks under plain torchrun print of their weights, found out once for a script and its arguments.

    The calls of the framework find functions there that do nothing.
    """

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self._new_folder = new_folder
        self._known: dict[tuple[str, ...], dict[int, list[str]]] = {}

    def __call__(self, script: str, ranks: int, *arguments: str, device: str = "") -> dict[int, list[str]]:
        key = (script, str(ranks), *arguments, device)
        if key not in self._known:
            paths = [str(REPOSITORY / "tests" / "without_mindio"), environment(device).get("PYTHONPATH", "")]
            result = Launch(
                "torch.distributed.run",
                script,
                ranks,
                self._new_folder("undisturbed"),
                ["--standalone"],
                [*STEPS, *arguments],
                device=device,
                within=["env", f"PYTHONPATH={':'.join(filter(None, paths))}"],
            ).finish()
            assert result.exit_code == 0, result.story()
            self._known[key] = result.hashes
        return self._known[key]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """`weights(script, ranks, ...)`: the hashes of a run that nothing disturbs."""
    return Undisturbed(tmp_path_factory.mktemp)


@pytest.mark.parametrize("phase", ["backward", "in_step"])
def test_a_rank_killed_in_a_frameworks_train_function_is_replaced_and_weights_are_identical(
    run_ttprun: RunTtprun, weights: Undisturbed, phase: str
) -> None:
    result = run_ttprun(PAIR, 2, faults=[f"kill:rank=1,step=12,phase={phase}"], options=MINDIO, script_args=STEPS)

    assert_recovered_by(result, ["replace"])
    assert_survivors_kept_their_pids(result)
    assert result.hashes == weights(PAIR, 2), result.story()
    assert result.exit_code == 0, result.story()


def test_a_tensor_parallel_rank_is_repaired_from_the_rank_that_holds_its_shard(
    run_ttprun: RunTtprun, weights: Undisturbed
) -> None:
    result = run_ttprun(MEGATRON, 4, faults=["kill:rank=1,step=12,phase=backward"], options=MINDIO, script_args=STEPS)

    assert_recovered_by(result, ["replace"])
    assert_survivors_kept_their_pids(result)
    assert parts_of(result) == [{"3": ["send"], "1": ["receive"]}]
    assert result.hashes == weights(MEGATRON, 4), result.story()


def test_a_healthy_rank_is_replaced_as_planned_and_nothing_else_changes(
    run_ttprun: RunTtprun, weights: Undisturbed
) -> None:
    result = run_ttprun(MEGATRON, 4, options=MINDIO, script_args=[*STEPS, "--hot-switch=12:1"])

    assert_recovered_by(result, ["replace"])
    (incident,) = result.incidents
    assert (incident["kind"], incident["ranks"]) == ("planned", [1]), result.story()
    assert {rank: len(pids) for rank, pids in result.pids.items()} == {0: 1, 1: 2, 2: 1, 3: 1}, result.story()
    assert parts_of(result) == [{"3": ["send"], "1": ["receive"]}]
    assert "rank 1 has a new process (hot switch)" in result.stdout[1], result.story()
    assert result.hashes == weights(MEGATRON, 4), result.story()


def test_a_rank_dies_while_others_are_replaced_as_planned(run_ttprun: RunTtprun, weights: Undisturbed) -> None:
    faults = ["kill:rank=3,phase=rebuild"]

    result = run_ttprun(MEGATRON, 4, faults=faults, options=MINDIO, script_args=[*STEPS, "--hot-switch=12:0"])

    assert_recovered_by(result, ["replace"])
    assert [len(result.pids[rank]) for rank in (1, 2, 3)] == [1, 1, 2], result.story()
    assert "rank 0 has a new process (hot switch)" in result.stdout[0], result.story()
    assert "rank 3 has a new process (arf)" in result.stdout[3], result.story()
    assert result.hashes == weights(MEGATRON, 4), result.story()


def test_the_framework_loads_its_checkpoint_when_a_shard_is_lost_with_all_its_copies(
    run_ttprun: RunTtprun, weights: Undisturbed
) -> None:
    faults = ["kill:rank=0,step=12,phase=backward", "kill:rank=2,phase=freeze"]

    result = run_ttprun(
        MEGATRON, 4, faults=faults, options=MINDIO, script_args=[*STEPS, "--dropout=0", "--save-every=5"]
    )

    (incident,) = result.incidents
    assert (incident["outcome"], incident["boundary"], incident["steps_lost"]) == ("recovered", 10, 2), result.story()
    assert result.hashes == weights(MEGATRON, 4, "--dropout=0"), result.story()


@pytest.mark.parametrize(
    ("broken", "rung", "parts"),
    [
        ("12:0:high", "rerun", [{"2": ["send"], "0": ["receive in place"]}]),
        ("12:0:low", "rerun", [{"0": ["keep"]}]),
        ("12:1:link", "reconnect", []),
    ],
)
def test_a_devices_failed_memory_or_link_is_repaired_in_the_same_process(
    run_ttprun: RunTtprun, weights: Undisturbed, broken: str, rung: str, parts: list[dict[str, list[str]]]
) -> None:
    arguments = [*STEPS, "--device=npu", "--deterministic", "--break", broken]

    result = run_ttprun(MEGATRON, 4, options=MINDIO, script_args=arguments, device="npu")

    assert_recovered_by(result, [rung])
    assert parts_of(result) == parts, result.story()
    assert [len(pids) for pids in result.pids.values()] == [1] * 4, result.story()
    assert result.hashes == weights(MEGATRON, 4, "--device=npu", "--deterministic", device="npu"), result.story()


def test_a_job_that_ends_is_dumped_by_the_framework_and_goes_on_from_there(
    run_ttprun: RunTtprun, weights: Undisturbed
) -> None:
    dumped = run_ttprun(
        MEGATRON,
        4,
        faults=["kill:rank=1,step=12,phase=backward"],
        options=[*MINDIO, "--rungs", "persist"],
        script_args=[*STEPS, "--dropout=0"],
    )
    out = dumped.folder / "out"
    gone_on = run_ttprun(MEGATRON, 4, options=MINDIO, script_args=[*STEPS, "--dropout=0", f"--load={out}"])

    assert dumped.exit_code not in (0, None), dumped.story()
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "12\n", dumped.story()
    assert {path.name for path in (out / "iter_0000012").iterdir()} == {"tp_0_shard_0.pt", "tp_1_shard_0.pt"}
    assert gone_on.hashes == weights(MEGATRON, 4, "--dropout=0"), gone_on.story()


def test_a_group_that_restarts_goes_on_from_what_the_framework_has_saved_just_before(
    run_ttprun: RunTtprun, weights: Undisturbed
) -> None:
    result = run_ttprun(
        MEGATRON,
        4,
        faults=["kill:rank=1,step=12,phase=backward"],
        options=[*MINDIO, "--rungs", "restart,persist", "--max-restarts=1"],
        script_args=[*STEPS, "--dropout=0", "--load=../out"],
    )

    (incident,) = result.incidents
    assert (incident["rung"], incident["outcome"]) == ("restart", "restarted"), result.story()
    assert "its state was saved: step 12, by the framework's save_ckpt handler" in incident["reason"]
    assert {path.name for path in (result.folder / "out").glob("iter_*")} == {"iter_0000012"}, result.story()
    assert result.exit_code == 0, result.story()
    assert result.hashes == weights(MEGATRON, 4, "--dropout=0"), result.story()


def test_a_rank_lost_before_the_first_step_makes_all_start_again(run_ttprun: RunTtprun, weights: Undisturbed) -> None:
    result = run_ttprun(
        PAIR,
        2,
        faults=["kill:rank=1,step=0,phase=backward"],
        options=[*MINDIO, "--max-restarts=1"],
        script_args=STEPS,
    )

    assert [incident["rung"] for incident in result.incidents] == ["restart"], result.story()
    # The other rank is one of these, whichever of the two is faster.
    whys = "it has not completed an update of the optimizer yet", "it is not in the function that tft_exception_handler"
    assert any(why in result.incidents[0]["reason"] for why in whys), result.story()
    assert result.exit_code == 0, result.story()
    assert {rank: lines[-1:] for rank, lines in result.hashes.items()} == weights(PAIR, 2), result.story()


# Training with fewer ranks. No replacement is to be had where the rung is left out.
IRREPLACEABLE = (*MINDIO, "--rungs", "reconnect,rerun,resize,restart,persist")


def test_a_replica_leaves_the_rest_trains_on_the_same_batches_and_all_train_again_with_identical_weights(
    run_ttprun: RunTtprun, weights: Undisturbed
) -> None:
    faults = ["kill:rank=3,step=12,phase=backward"]

    result = run_ttprun(
        MEGATRON, 4, faults=faults, options=IRREPLACEABLE, script_args=[*STEPS, "--dropout=0", "--upgrade=20"]
    )

    assert_recovered_by(result, ["resize", "resize"])
    assert [(one["kind"], one["ranks"], one["boundary"]) for one in result.incidents] == [
        ("signal 9", [3], 12),
        ("upgrade", [2, 3], 20),
    ], result.story()
    assert sizes_of(result) == [[2, 3], []]
    assert parts_of(result) == [{"0": ["send"], "1": ["send"], "2": ["receive"], "3": ["receive"]}], result.story()
    assert [len(result.pids[rank]) for rank in (0, 1)] == [1, 1], result.story()
    assert result.hashes == weights(MEGATRON, 4, "--dropout=0"), result.story()
    assert result.exit_code == 0, result.story()


def test_ranks_that_are_away_can_be_called_back_at_any_moment(start_ttprun: StartTtprun, weights: Undisturbed) -> None:
    longer = ("--dropout=0", "--steps=150")
    faults = ["kill:rank=1,step=12,phase=collective"]
    launch = start_ttprun(MEGATRON, 4, faults=faults, options=IRREPLACEABLE, script_args=longer)
    launch.wait_for_event("group_resized")

    recall = [sys.executable, "-m", "ttprun", "recall", str(launch.run_dir)]
    reported = subprocess.run(recall, capture_output=True, text=True, check=False, env=dict(environment()))
    result = launch.finish()

    assert (reported.returncode, reported.stdout) == (0, "rank 0, 1 called back\n"), reported.stderr
    assert_recovered_by(result, ["resize", "resize"])
    assert "ttprun recall" in result.incidents[1]["reason"], result.story()
    assert result.hashes == weights(MEGATRON, 4, *longer), result.story()
    assert result.exit_code == 0, result.story()


def test_a_rank_of_a_smaller_group_is_replaced_from_one_that_is_left(run_ttprun: RunTtprun) -> None:
    on_its_way = ["kill:rank=3,phase=rebuild"] * 3
    faults = ["kill:rank=3,step=12,phase=backward", *on_its_way, "kill:rank=2,step=20,phase=backward"]
    layout = ("--dropout=0", "--tensor-parallel=1")

    result = run_ttprun(MEGATRON, 4, faults=faults, options=MINDIO, script_args=[*STEPS, *layout, "--upgrade=25"])

    assert_recovered_by(result, ["resize", "replace", "resize"])
    assert "3 attempts to replace rank 3 failed" in result.incidents[0]["reason"], result.story()
    assert sizes_of(result) == [[3], []], result.story()
    assert parts_of(result)[-2:] == [{"0": ["send"], "2": ["receive"]}, {"1": ["send"], "3": ["receive"]}]
    assert result.exit_code == 0, result.story()
    assert len({lines[-1].split()[-1] for lines in result.hashes.values()}) == 1, result.story()


def test_a_framework_without_handlers_for_fewer_ranks_is_restarted_as_ever(
    run_ttprun: RunTtprun, weights: Undisturbed
) -> None:
    faults = ["kill:rank=1,step=12,phase=backward"]
    options = [*IRREPLACEABLE, "--max-restarts=1"]

    result = run_ttprun(PAIR, 2, faults=faults, options=options, script_args=STEPS)

    assert [incident["rung"] for incident in result.incidents] == ["restart"], result.story()
    assert "not replaced: replacement is switched off (rungs)" in result.incidents[0]["reason"], result.story()
    assert "no save_ckpt handler is registered" in result.output
    assert "is a bug of ttprun" not in result.output
    assert {rank: lines[-1:] for rank, lines in result.hashes.items()} == weights(PAIR, 2), result.story()


def sizes_of(result: Run) -> list[list[int]]:
    """Who was away after each change of the group's size."""
    return [event["away"] for event in result.events if event["event"] == "group_resized"]


def parts_of(result: Run) -> list[dict[str, list[str]]]:
    """Who did what in each repair."""
    return [event["parts"] for event in result.events if event["event"] == "repair_planned"]
