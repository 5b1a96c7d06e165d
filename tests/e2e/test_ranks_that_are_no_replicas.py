"""Ranks that hold weights of their own, in plain tensors: never another rank's, and no checkpoint without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_same_outcome
from tests.e2e.test_checkpoints import Series, assert_resumed, ttprun

SHARDS = "tensor_parallel.py"  # 30 steps
UNMIRRORED = ["--buddy", "off"]
OWN = "up.weight, up.bias, down.weight"
KILL = "kill:rank=1,step=13,phase=backward"


def assert_went_back(run: Run, reference: Run) -> None:
    """All ranks went back to a snapshot, and ended with the weights that an undisturbed run gives to each."""
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("rewind", "recovered")], run.story()
    assert (run.exit_code, run.final, run.hashes) == (0, reference.final, reference.hashes), run.story()


@pytest.mark.parametrize(
    ("rank", "step", "phase", "arguments", "names"),
    [
        (1, 13, "backward", [], OWN),
        (1, 20, "in_step", ["--table"], "table.weight, up.weight, up.bias and 1 more"),
    ],
)
def test_a_lost_shard_comes_from_the_snapshot_and_not_from_another_rank(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    rank: int,
    step: int,
    phase: str,
    arguments: Sequence[str],
    names: str,
) -> None:
    kill = f"kill:rank={rank},step={step},phase={phase}"

    run = run_ttprun(SHARDS, 2, faults=[kill], script_args=arguments, options=UNMIRRORED)

    assert f"differ between the ranks ({names})" in run.output, run.story()
    assert "no snapshot is taken yet (--snapshot-every auto), and if one is lost now, the job ends" in run.output
    assert "the first snapshot is taken: if a rank is lost, all ranks go back to the snapshot" in run.output, (
        run.story()
    )
    assert f"no other rank holds what rank {rank} held: {names}" in run.incidents[0]["reason"], run.story()
    assert_went_back(run, undisturbed(SHARDS, 2, arguments))


def test_with_two_replicas_of_each_shard_a_rank_is_replaced_from_the_one_that_holds_its_shard(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(SHARDS, 4, faults=[KILL], script_args=["--replicas", "2"])

    assert "the ranks 0, 2 and 1, 3 hold the same" in run.output, run.story()
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("replace", "recovered")], run.story()
    assert_same_outcome(run, undisturbed(SHARDS, 4, ["--replicas", "2"]))


def test_a_checkpoint_without_the_lost_rank_s_weights_is_incomplete_and_nothing_goes_on_from_it(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = Series(run_ttprun, tmp_path, SHARDS, 2)

    first = job.launch(faults=[KILL], options=[*UNMIRRORED, "--rungs", "persist", "--snapshot-every", "5steps"])
    (left,) = job.save_dir.glob("incomplete-*")
    newest = max(int(path.name.removeprefix("step-")) for path in job.save_dir.glob("step-*"))
    manifest = json.loads((left / "ttprun.json").read_text())
    listed = ttprun("checkpoints", "list", "--save-dir", str(job.save_dir)).stdout
    verified = ttprun("checkpoints", "verify", str(left))
    second = job.launch()

    missing = ["up.weight (rank 1)", "up.bias (rank 1)", "down.weight (rank 1)"]
    assert first.exit_code == 137, first.story()
    assert f"it would lack {', '.join(missing)}" in first.status["reason"], first.story()
    assert (manifest["completed"], manifest["missing"]) == (False, missing)
    assert f"{left.name}: it is incomplete: up.weight (rank 1)" in listed
    assert verified.returncode != 0, verified.stdout
    assert_resumed(second, newest)
    reference = undisturbed(SHARDS, 2)
    assert (second.exit_code, second.final, second.hashes) == (0, reference.final, reference.hashes), second.story()
