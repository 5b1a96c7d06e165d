"""A framework that owns its train function: its callbacks have lost ranks replaced, and failed memory filled again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import (
    REPOSITORY,
    Launch,
    Run,
    RunTtprun,
    assert_recovered_by,
    assert_survivors_kept_their_pids,
    environment,
)

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


# Tensor times pipeline times data parallel, on NPUs: torch_npu's own groups and functions, in MindSpeed-LLM's order.
PIPELINE = ("--tensor-parallel=1", "--pipeline-parallel=2")
ALL_THREE = ("--tensor-parallel=2", "--pipeline-parallel=2")
SHARDED = ("--tensor-parallel=1",)
ON_NPU = ("--device=npu", "--deterministic")


@pytest.mark.parametrize(
    ("layout", "ranks", "broken", "rung", "parts"),
    [
        (PIPELINE, 4, "12:2:weight", "rerun", [{"3": ["send"], "2": ["receive in place"]}]),
        (PIPELINE, 4, "12:0:activation", "rerun", [{"0": ["keep"]}]),
        (PIPELINE, 4, "12:1:link", "reconnect", []),
        (SHARDED, 4, "12:3:high", "rerun", [{"1": ["send"], "3": ["receive in place"]}]),
        (ALL_THREE, 8, "12:5:moment", "rerun", [{"7": ["send"], "5": ["receive in place"]}]),
    ],
    ids=["weight", "activation", "link", "optimizer state", "optimizer state in an update of eight ranks"],
)
def test_memory_that_fails_under_a_pipeline_is_repaired_in_the_same_process_and_no_weight_differs(
    run_ttprun: RunTtprun,
    weights: Undisturbed,
    layout: tuple[str, ...],
    ranks: int,
    broken: str,
    rung: str,
    parts: list[dict[str, list[str]]],
) -> None:
    arguments = [*layout, *ON_NPU]

    result = run_ttprun(
        MEGATRON, ranks, options=MINDIO, script_args=[*STEPS, *arguments, "--break", broken], device="npu"
    )

    assert_recovered_by(result, [rung])
    assert parts_of(result) == parts, result.story()
    assert [len(pids) for pids in result.pids.values()] == [1] * ranks, result.story()
    assert result.hashes == weights(MEGATRON, ranks, *arguments, device="npu"), result.story()


@pytest.mark.parametrize(
    ("faults", "broken", "rungs"),
    [
        (["kill:rank=1,step=12,phase=backward", "kill:rank=2,phase=rebuild"], (), ["replace"]),
        (
            ["kill:rank=1,step=8,phase=backward", "kill:rank=2,step=14,phase=before_step"],
            ("--break=11:3:moment",),
            ["replace", "rerun", "replace"],
        ),
    ],
    ids=["while groups are connected", "one after the other, memory in between"],
)
def test_lost_ranks_of_a_pipeline_on_a_device_are_replaced_and_no_weight_differs(
    run_ttprun: RunTtprun, weights: Undisturbed, faults: list[str], broken: tuple[str, ...], rungs: list[str]
) -> None:
    arguments = [*PIPELINE, *ON_NPU]

    result = run_ttprun(
        MEGATRON, 4, faults=faults, options=MINDIO, script_args=[*STEPS, *arguments, *broken], device="npu"
    )

    assert_recovered_by(result, rungs)
    assert [len(result.pids[rank]) for rank in (0, 3)] == [1, 1], result.story()
    assert result.hashes == weights(MEGATRON, 4, *arguments, device="npu"), result.story()


@pytest.mark.parametrize(
    ("faults", "broken"),
    [(["kill:rank=1,step=12,phase=backward"], ()), ([], ("--break=12:1:high",))],
    ids=["a process is lost", "memory has failed"],
)
def test_a_pipeline_on_a_device_is_dumped_before_its_job_ends_and_goes_on_from_there(
    run_ttprun: RunTtprun, weights: Undisturbed, faults: list[str], broken: tuple[str, ...]
) -> None:
    arguments = [*PIPELINE, *ON_NPU, "--dropout=0"]
    options = [*MINDIO, "--rungs", "persist"]

    dumped = run_ttprun(
        MEGATRON, 4, faults=faults, options=options, script_args=[*STEPS, *arguments, *broken], device="npu"
    )
    out = dumped.folder / "out"
    gone_on = run_ttprun(MEGATRON, 4, options=MINDIO, script_args=[*STEPS, *arguments, f"--load={out}"], device="npu")

    assert dumped.exit_code not in (0, None), dumped.story()
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "12\n", dumped.story()
    saved = {path.name for path in (out / "iter_0000012").iterdir()}
    assert saved == {"pp_0_tp_0_shard_0.pt", "pp_1_tp_0_shard_0.pt"}
    assert gone_on.hashes == weights(MEGATRON, 4, *arguments, device="npu"), gone_on.story()


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


def sizes_of(result: Run) -> list[list[int]]:
    """Who was away after each change of the group's size."""
    return [event["away"] for event in result.events if event["event"] == "group_resized"]


def parts_of(result: Run) -> list[dict[str, list[str]]]:
    """Who did what in each repair."""
    return [event["parts"] for event in result.events if event["event"] == "repair_planned"]
