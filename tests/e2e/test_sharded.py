"""Scripts whose parameters are sharded over the ranks: a rank is replaced from one that holds the same part, if any.

Otherwise all go back to what was stored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.e2e.harness import Run, RunTtprun, StartTtprun, Undisturbed, assert_same_outcome
from tests.e2e.test_checkpoints import Series, assert_resumed, assert_saved, ttprun
from ttprun import torch_versions
from ttprun.observe.status import read_topology
from ttprun.state.tensor_file import assemble, pieces_of

pytestmark = pytest.mark.skipif(
    torch_versions.release_of(torch.__version__) < (2, 7),
    reason="torch 2.6 itself cannot run fully_shard on the processor (CPU streams without record_event)",
)

TENSOR_PARALLEL = "tensor_parallel_mesh.py"
BY_HAND = "tensor_parallel.py"
FSDP = "fsdp_model.py"  # 27 steps with 2 ranks, 9 an epoch
EPOCH_SAMPLES = 72
UNMIRRORED = ["--buddy", "off"]
SAID = re.compile(r"ranks 0, 1(, 2, 3)? each hold what no other rank holds: mirrored in [\d.]+ [KM]iB of memory")
STEP = re.compile(r"\[rank \d+\] epoch (\d+) step (\d+) .* samples (\[.*\])")


@pytest.fixture
def series(run_ttprun: RunTtprun, tmp_path: Path) -> Callable[..., Series]:
    """`series(ranks)`: launches of one job."""
    return lambda ranks: Series(run_ttprun, tmp_path, FSDP, ranks)


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All that the ranks have stored together: weights and optimizer state, whole."""
    pieces = pieces_of(sorted(str(path) for path in checkpoint.glob("*.safetensors")))
    return {key: assemble(key, found) for key, found in pieces.items()}


def assert_as_undisturbed(run: Run, reference: Run) -> None:
    """It ended with the same weights, and what it has said is the same, but for what came out again."""
    assert (run.exit_code, run.final) == (0, reference.final), run.story()
    for rank, lines in reference.stdout.items():
        assert list(dict.fromkeys(run.stdout[rank])) == lines, run.story()


@pytest.mark.parametrize(("rank", "step", "phase"), [(0, 17, "collective"), (1, 11, "in_step")])
def test_when_a_rank_dies_all_go_back_to_a_snapshot_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, rank: int, step: int, phase: str
) -> None:
    kill = f"kill:rank={rank},step={step},phase={phase}"

    run = run_ttprun(FSDP, 2, faults=[kill], options=[*UNMIRRORED, "--snapshot-every", "5steps"])

    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("rewind", "recovered"), run.story()
    assert incident["boundary"] in (5, 10, 15), run.story()
    assert f"no other rank holds what rank {rank} held: embedding.weight, " in incident["reason"], run.story()
    assert_as_undisturbed(run, undisturbed(FSDP, 2))


SHORT = ["--samples", "56", "--epochs", "1"]  # 7 steps with 2 ranks


@pytest.mark.parametrize(
    ("script", "ranks", "arguments", "kills"),
    [
        (FSDP, 2, SHORT, [(1, 3, "in_step"), (0, 5, "backward")]),
        (FSDP, 2, [], [(1, 9, "after_step"), (1, 12, "collective"), (0, 18, "validation"), (0, 22, "forward")]),
        (TENSOR_PARALLEL, 4, ["--fsdp"], [(1, 9, "backward"), (2, 14, "in_step")]),
        (BY_HAND, 2, ["--table"], [(1, 9, "in_step"), (0, 14, "backward"), (1, 18, "forward")]),
    ],
    ids=["short", "fsdp", "tensor parallel", "by hand"],
)
def test_a_rank_that_alone_holds_its_shards_is_replaced_from_its_mirror_and_nothing_differs(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    script: str,
    ranks: int,
    arguments: list[str],
    kills: list[tuple[int, int, str]],
) -> None:
    faults = [f"kill:rank={rank},step={step},phase={phase}" for rank, step, phase in kills]

    run = run_ttprun(script, ranks, script_args=arguments, faults=faults)

    assert {(one["rung"], one["outcome"]) for one in run.incidents} == {("replace", "recovered")}, run.story()
    assert SAID.search(run.output), run.story()
    assert {rank.loss for rank in read_topology(run.folder / "run" / "topology.json").ranks} == {"buddy"}
    assert_same_outcome(run, undisturbed(script, ranks, arguments))


def test_where_mirrors_do_not_fit_the_console_says_so_and_a_lost_rank_sends_all_back(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    options = ["--buddy-memory", "100KiB", "--snapshot-every", "5steps"]

    run = run_ttprun(FSDP, 2, faults=["kill:rank=1,step=13,phase=backward"], options=options)

    said = r"hold what no other rank holds, not mirrored: too little memory: 1\.2 MiB, and 100\.0 KiB may be used"
    assert re.search(said, run.output), run.story()
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("rewind", "recovered")], run.story()
    assert_as_undisturbed(run, undisturbed(FSDP, 2))


HSDP = ["--replicas", "2"]


@pytest.mark.parametrize(
    ("rank", "step", "phase"),
    [
        (2, 12, "after_step"),
        (0, 10, "validation"),
    ],
)
def test_of_shards_that_have_replicas_a_lost_rank_is_replaced_from_its_own_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, rank: int, step: int, phase: str
) -> None:
    run = run_ttprun(FSDP, 4, script_args=HSDP, faults=[f"kill:rank={rank},step={step},phase={phase}"])

    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("replace", "recovered"), run.story()
    assert_same_outcome(run, undisturbed(FSDP, 4, HSDP))


@pytest.mark.parametrize(
    ("rank", "step", "phase"),
    [(3, 12, "in_step"), (2, 1, "forward")],
)
def test_a_tensor_parallel_rank_is_replaced_from_its_data_parallel_peer_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, rank: int, step: int, phase: str
) -> None:
    run = run_ttprun(TENSOR_PARALLEL, 4, faults=[f"kill:rank={rank},step={step},phase={phase}"])

    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("replace", "recovered"), run.story()
    assert "(up.weight, up.bias, down.weight): the ranks 0, 2 and 1, 3 hold the same" in run.output, run.story()
    topology = read_topology(run.folder / "run" / "topology.json")
    assert topology.groups == {"dp0": (0, 2), "dp1": (1, 3), "tp0": (0, 1), "tp1": (2, 3)}
    assert topology.replicas == ((0, 2), (1, 3))
    assert_same_outcome(run, undisturbed(TENSOR_PARALLEL, 4))


def test_what_is_sharded_by_fsdp_over_tensor_parallelism_comes_back_from_a_snapshot_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    """Each part has one holder, and lies in a mesh of some of the ranks, or is cut twice along one dimension."""
    kill, arguments, options = (
        "kill:rank=1,step=9,phase=backward",
        ["--fsdp"],
        [*UNMIRRORED, "--snapshot-every", "5steps"],
    )

    run = run_ttprun(TENSOR_PARALLEL, 4, script_args=arguments, faults=[kill], options=options)

    assert {rank.loss for rank in read_topology(run.folder / "run" / "topology.json").ranks} == {"snapshot"}
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("rewind", "recovered")], run.story()
    assert_as_undisturbed(run, undisturbed(TENSOR_PARALLEL, 4, arguments))


def test_what_a_lost_rank_has_taken_with_it_is_named_and_the_next_launch_goes_on_from_before(
    series: Callable[..., Series], undisturbed: Undisturbed
) -> None:
    job = series(2)

    options = [*UNMIRRORED, "--snapshot-every", "5steps", "--rungs", "persist"]
    first = job.launch(faults=["kill:rank=1,step=13,phase=backward"], options=options)
    listed = ttprun("checkpoints", "list", "--save-dir", str(job.save_dir)).stdout
    second = job.launch()

    assert first.exit_code == 137, first.story()
    missing = "embedding.weight rows 25:50 (rank 1), blocks.0.norm1.weight rows 16:32 (rank 1)"
    assert f"no checkpoint was written: it would lack {missing}" in first.status["reason"], first.story()
    assert f"incomplete-step-00000013: it is incomplete: {missing}" in listed
    assert "checkpoint incomplete-step-00000013 in" in second.output, second.story()
    assert "is skipped: it is incomplete: embedding.weight rows 25:50 (rank 1)" in second.output, second.story()
    assert_resumed(second, 10)
    assert_as_undisturbed(job.as_one(), undisturbed(FSDP, 2))


@pytest.mark.parametrize(("script", "step"), [(FSDP, 13), (BY_HAND, 13)], ids=["fsdp", "by hand"])
def test_what_a_lost_rank_has_mirrored_is_in_the_last_checkpoint_and_the_next_launch_loses_nothing(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, script: str, step: int
) -> None:
    job = Series(run_ttprun, tmp_path, script, 2)

    options = ["--rungs", "persist"]
    first = job.launch(faults=[f"kill:rank=1,step={step},phase=backward"], options=options)
    second = job.launch()

    assert_saved(first, "dying gasp", exit_code=137)
    assert_resumed(second, step)
    assert_same_outcome(job.as_one(), undisturbed(script, 2))


def test_a_checkpoint_in_the_middle_of_a_step_costs_training_nothing_and_the_model_can_be_taken_out_of_it(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    longer = ["--epochs", "12"]
    launch = start_ttprun(FSDP, 2, script_args=longer, options=["--save-dir", str(tmp_path / "save")])
    launch.wait_for_line(1, " step 12 ")

    asked = ttprun("checkpoint", "now", "--run", str(launch.run_dir))
    exported = ttprun(
        "checkpoints", "export", "latest", "--save-dir", str(tmp_path / "save"), "--out", str(tmp_path / "model.pt")
    )
    run = launch.finish()

    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert_same_outcome(run, undisturbed(FSDP, 2, longer))
    assert exported.returncode == 0, exported.stdout + exported.stderr
    model, final = torch.load(tmp_path / "model.pt"), torch.load(launch.folder / "out" / "final.pt")
    assert {name: tensor.shape for name, tensor in final.items()} == {
        name: tensor.shape for name, tensor in model.items() if name != "seen"
    }


@pytest.mark.parametrize(("old", "new"), [(2, 3), (4, 2)])
def test_another_number_of_ranks_goes_on_with_the_very_same_weights_and_trains_on_each_sample_once(
    run_ttprun: RunTtprun, tmp_path: Path, old: int, new: int
) -> None:
    save_dir = tmp_path / "save"
    how = {"options": ["--save-dir", str(save_dir)], "out": tmp_path / "out"}
    step = 6 if old == 4 else 13  # in the second epoch
    first = run_ttprun(FSDP, old, faults=[f"preempt:rank=0,step={step},phase=forward"], **how)
    assert_saved(first, "ended")
    before = tensors_of(Path(first.status["checkpoint"]["path"]))
    boundary = first.status["checkpoint"]["boundary"]

    # Behind the checkpoint that it has begun with, it is made to write one at once.
    second = run_ttprun(FSDP, new, faults=[f"preempt:rank=0,step={boundary},phase=backward"], **how)
    after = tensors_of(Path(second.status["checkpoint"]["path"]))
    third = run_ttprun(FSDP, new, **how)

    assert_saved(second, "ended")
    assert second.status["checkpoint"]["boundary"] == boundary, second.story()
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == ["model/seen"]
    assert third.exit_code == 0, third.story()
    used = counted([first], 1, up_to=boundary) + counted([second, third], 1, behind=boundary)
    left = EPOCH_SAMPLES - sum(counted([first], 1, up_to=boundary).values())
    assert set(used) == set(range(EPOCH_SAMPLES)), third.story()
    assert sum(used.values()) - EPOCH_SAMPLES == -left % new, third.story()
    assert len({line.split()[-1] for lines in third.hashes.values() for line in lines}) == 1, third.story()


def counted(runs: Sequence[Run], epoch: int, up_to: int = 1 << 30, behind: int = 0) -> Counter[int]:
    """How often each sample was trained on in an epoch, in steps of these numbers."""
    found = (STEP.fullmatch(line) for run in runs for lines in run.stdout.values() for line in dict.fromkeys(lines))
    steps = [match for match in found if match and int(match[1]) == epoch and behind < int(match[2]) <= up_to]
    return Counter(int(sample) for match in steps for sample in match[3].strip("[]").split(", "))
