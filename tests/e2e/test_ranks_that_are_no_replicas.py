"""Ranks that hold weights of their own, in plain tensors: never another rank's, and no checkpoint without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_same_outcome
from tests.e2e.test_checkpoints import Series, assert_resumed, assert_saved, ttprun

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


def test_tables_that_part_long_after_the_first_steps_are_noticed_before_one_takes_the_place_of_another(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    arguments = ["--whole", "--table", "--late", "8"]

    run = run_ttprun(SHARDS, 2, faults=[KILL], script_args=arguments, options=["--snapshot-every", "5steps"])

    assert "they do not replicate each other" in run.incidents[0]["reason"], run.story()
    assert "ranks that were replicas of each other hold different values of table.weight" in run.output, run.story()
    assert run.incidents[0]["boundary"] == 5, run.story()
    assert_went_back(run, undisturbed(SHARDS, 2, arguments))


def test_without_a_snapshot_the_group_restarts_and_never_trains_on_with_another_rank_s_shard(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(
        SHARDS, 2, faults=[KILL], options=[*UNMIRRORED, "--snapshot-every", "never", "--max-restarts", "1"]
    )

    assert "no snapshots are taken (--snapshot-every), and if one is lost now, all ranks start again" in run.output, (
        run.story()
    )
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("restart", "restarted")], run.story()
    reference = undisturbed(SHARDS, 2)
    assert (run.exit_code, run.final, run.hashes) == (0, reference.final, reference.hashes), run.story()


def test_with_two_replicas_of_each_shard_a_rank_is_replaced_from_the_one_that_holds_its_shard(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(SHARDS, 4, faults=[KILL], script_args=["--replicas", "2"])

    assert "the ranks 0, 2 and 1, 3 hold the same" in run.output, run.story()
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("replace", "recovered")], run.story()
    assert_same_outcome(run, undisturbed(SHARDS, 4, ["--replicas", "2"]))


def test_when_both_holders_of_a_shard_are_lost_nothing_differs(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    """All go back to a snapshot, unless the first one was repaired by the other before that was lost, too."""
    faults, arguments = [KILL, "kill:rank=3,step=13,phase=backward"], ["--replicas", "2"]

    run = run_ttprun(SHARDS, 4, faults=faults, script_args=arguments, options=["--snapshot-every", "5steps"])

    reference = undisturbed(SHARDS, 4, arguments)
    assert {one["outcome"] for one in run.incidents} == {"recovered"}, run.story()
    assert (run.exit_code, run.final, run.hashes) == (0, reference.final, reference.hashes), run.story()


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


def test_a_job_that_is_ended_saves_what_each_rank_holds_and_goes_on_with_it(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = Series(run_ttprun, tmp_path, SHARDS, 2)

    first = job.launch(faults=["preempt:rank=1,step=13,phase=forward"])
    exported = ttprun(
        "checkpoints",
        "export",
        "latest",
        "--save-dir",
        str(job.save_dir),
        "--out",
        str(tmp_path / "m.pt"),
        "--model",
        "model",
    )
    second = job.launch()

    assert_saved(first, "ended")
    assert "the ranks held different values of down.weight, up.bias, up.weight" in exported.stderr + exported.stdout
    assert_resumed(second, first.status["checkpoint"]["boundary"])
    assert_same_outcome(job.as_one(), undisturbed(SHARDS, 2))


def test_shards_are_not_dealt_out_to_another_number_of_ranks(run_ttprun: RunTtprun, tmp_path: Path) -> None:
    save_dir = ["--save-dir", str(tmp_path / "save")]
    run_ttprun(SHARDS, 2, faults=["preempt:rank=1,step=13,phase=forward"], options=save_dir)

    run = run_ttprun(SHARDS, 4, options=save_dir)

    assert run.exit_code == 2, run.story()
    assert f"its ranks held different values of {OWN}" in run.output, run.story()
