"""Nothing that was computed is lost when the job must go: scenarios A6, A27 and A29, and what `--resume` promises.

What a job and the one that goes on from its checkpoint have printed, one behind the other, is what an undisturbed run
prints; so each test reads like one run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import (
    EPOCHS,
    PLAIN,
    TWO_OPTIMIZERS,
    Run,
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_same_outcome,
    ttprun,
)


class Series:
    """Launches of one job by the same command, one after the other."""

    def __init__(self, run_ttprun: RunTtprun, folder: Path, script: str, ranks: int, args: Sequence[str] = ()) -> None:
        self._run = run_ttprun
        self.save_dir = folder / "save"
        self._out = folder / "out"
        self._script, self._ranks = script, ranks
        self._args = args
        self.runs: list[Run] = []

    def launch(self, faults: Sequence[str] = (), options: Sequence[str] = ()) -> Run:
        """The same command once more."""
        run = self._run(
            self._script,
            self._ranks,
            faults=faults,
            options=["--save-dir", str(self.save_dir), *options],
            script_args=self._args,
            out=self._out,
        )
        self.runs.append(run)
        return run

    def as_one(self) -> Run:
        """All that they have printed, as if it had been one run; the rest is that of the last one."""
        last = self.runs[-1]
        ranks = range(self._ranks)
        last.stdout = {rank: [line for run in self.runs for line in run.stdout.get(rank, [])] for rank in ranks}
        return last


@pytest.fixture
def series(run_ttprun: RunTtprun, tmp_path: Path) -> Callable[..., Series]:
    """`series(script, ranks, args=())`: launches of one job."""
    return lambda script, ranks, args=(): Series(run_ttprun, tmp_path, script, ranks, args)


def assert_saved(run: Run, cause: str, exit_code: int = 143) -> None:
    """The job has ended with a checkpoint from which the same command goes on, and has said so."""
    assert run.exit_code == exit_code, run.story()
    assert run.status["checkpoint"]["cause"] == cause, run.story()
    assert run.status["checkpoint"]["reason"] == "", run.story()
    assert "its state was saved, the same command resumes from it" in run.status["reason"], run.story()


def assert_resumed(run: Run, boundary: int) -> None:
    """The launch went on from a checkpoint of that boundary."""
    resume = run.status["resume"]
    assert (resume["outcome"], resume["boundary"]) == ("recovered", boundary), run.story()
    assert run.incidents == [], run.story()


PREEMPTED = [
    # script, ranks, step, phase
    (EPOCHS, 2, 17, "backward"),
    (TWO_OPTIMIZERS, 2, 22, "in_step"),
]


@pytest.mark.parametrize(("script", "ranks", "step", "phase"), PREEMPTED)
def test_a_job_that_is_preempted_in_any_phase_goes_on_by_the_same_command_and_nothing_differs(
    series: Callable[..., Series], undisturbed: Undisturbed, script: str, ranks: int, step: int, phase: str
) -> None:
    job = series(script, ranks)

    first = job.launch(faults=[f"preempt:rank={ranks - 1},step={step},phase={phase}"])
    second = job.launch()

    assert_saved(first, "ended")
    assert_resumed(second, first.status["checkpoint"]["boundary"])
    assert step <= first.status["checkpoint"]["boundary"] <= step + 2
    assert_same_outcome(job.as_one(), undisturbed(script, ranks))


@pytest.mark.parametrize(
    ("options", "words", "goes_on"),
    [
        (["--proof", "strict"], "no run can resume from it (rank 0: main: scales cannot be recorded", False),
        ([], "a run that resumes from it has what no record holds as its set-up makes it (main: scales", True),
    ],
    ids=["starts anew", "goes on without something"],
)
def test_a_job_that_would_not_go_on_as_it_was_is_never_promised_to_resume(
    series: Callable[..., Series], options: list[str], words: str, goes_on: bool
) -> None:
    job = series("unrecordable.py", 2)

    first = job.launch(faults=["preempt:rank=0,step=9,phase=before_step"], options=options)
    second = job.launch(options=options)

    assert words in first.status["reason"], first.story()
    assert "the same command resumes from it" not in first.output + first.status["reason"], first.story()
    assert bool(second.status["resume"]) == goes_on, second.story()


@pytest.mark.parametrize(
    ("script", "ranks", "lost"),
    [
        (PLAIN, 2, ["kill:rank=1,step=20,phase=backward"]),
    ],
    ids=["one of two"],
)
def test_one_living_rank_is_enough_for_a_dying_gasp(
    series: Callable[..., Series], undisturbed: Undisturbed, script: str, ranks: int, lost: list[str]
) -> None:
    job = series(script, ranks)

    first = job.launch(faults=lost, options=["--rungs", "persist"])
    second = job.launch()

    assert_saved(first, "dying gasp", exit_code=137)
    saved = first.status["checkpoint"]["boundary"]
    assert saved in (19, 20)  # who is left may still stand in front of the step that those who die have taken
    assert_resumed(second, saved)
    assert_same_outcome(job.as_one(), undisturbed(script, ranks))


def test_a_writer_that_is_killed_while_it_writes_leaves_the_checkpoint_to_the_others(
    series: Callable[..., Series], undisturbed: Undisturbed
) -> None:
    job = series(PLAIN, 3)

    first = job.launch(faults=["preempt:rank=0,step=10,phase=backward", "kill:rank=1,phase=persist"])
    job.launch()

    assert_saved(first, "ended")
    assert_same_outcome(job.as_one(), undisturbed(PLAIN, 3))


REWOUND = [(EPOCHS, 2, 16)]


@pytest.mark.parametrize(("script", "ranks", "step"), REWOUND)
def test_a_group_that_is_lost_as_a_whole_goes_back_to_a_snapshot_and_ends_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, ranks: int, step: int
) -> None:
    # In the step: the commit has let all ranks go at one moment, so none is lost and replaced before the next one is.
    kills = [f"kill:rank={rank},step={step},phase=in_step" for rank in range(ranks)]

    run = run_ttprun(script, ranks, faults=kills, options=["--snapshot-every", "5steps"])

    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"]) == ("rewind", "recovered"), run.story()
    assert incident["boundary"] % 5 == 0, run.story()
    assert incident["steps_lost"] <= step, run.story()
    reference = undisturbed(script, ranks)
    assert run.exit_code == 0, run.story()
    assert run.final == reference.final, run.story()
    assert {rank: lines[-1:] for rank, lines in run.stdout.items()} == {
        rank: lines[-1:] for rank, lines in reference.stdout.items()
    }, run.story()


def test_a_checkpoint_can_be_asked_for_while_training_goes_on(
    start_ttprun: StartTtprun, run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    same = {"script_args": ["--steps", "400"], "out": tmp_path / "out"}
    launch = start_ttprun(PLAIN, 2, **same, options=["--save-dir", str(tmp_path / "save")])
    launch.wait_for_line(0, "step 20 ")

    asked = ttprun("checkpoint", "now", "--run", str(launch.run_dir), "--json")
    first = launch.finish()

    reported = json.loads(asked.stdout)
    assert (asked.returncode, reported["cause"], reported["reason"]) == (0, "asked", ""), asked.stderr
    reference = undisturbed(PLAIN, 2, ["--steps", "400"])
    assert (first.exit_code, first.stdout, first.incidents) == (0, reference.stdout, []), first.story()
    second = run_ttprun(PLAIN, 2, **same, options=["--resume", reported["path"]])
    assert_resumed(second, reported["boundary"])
    assert second.hashes == reference.hashes, second.story()
    listed = json.loads(ttprun("checkpoints", "list", "--save-dir", str(tmp_path / "save"), "--json").stdout)
    assert [one["is_valid"] for one in listed["checkpoints"]] == [True]


def test_snapshots_go_to_the_disk_in_the_background_and_a_killed_launcher_loses_only_what_came_after(
    start_ttprun: StartTtprun, run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    options = ["--save-dir", str(tmp_path / "save"), "--snapshot-every", "10steps"]
    same = {"script_args": ["--steps", "400"], "out": tmp_path / "out", "options": options}
    launch = start_ttprun(PLAIN, 2, **same)
    launch.wait_for_event("checkpoint_written")
    launch.wait_for_rank(0, step=11)

    launch.kill_agent()
    first = launch.finish()
    second = run_ttprun(PLAIN, 2, **same)

    assert first.exit_code == -9
    assert_resumed(second, second.status["resume"]["boundary"])
    assert second.status["resume"]["boundary"] % 10 == 0
    said = r"was killed in step \d+: this one resumes from its checkpoint of step \d+, saved \d:\d\d:\d\d before, /"
    assert re.search(said, second.output), second.story()
    assert second.hashes == undisturbed(PLAIN, 2, ["--steps", "400"]).hashes, second.story()


def test_a_damaged_checkpoint_is_passed_over_with_its_reason_and_an_older_one_is_taken(
    series: Callable[..., Series], undisturbed: Undisturbed
) -> None:
    job = series(PLAIN, 2)
    job.launch(faults=["preempt:rank=0,step=10,phase=backward"])
    job.launch(faults=["preempt:rank=0,step=20,phase=backward"])
    older, newer = sorted(job.save_dir.glob("step-*"))
    flip_a_byte(newer / "tensors-00001.safetensors")

    third = job.launch()

    assert_resumed(third, int(older.name.removeprefix("step-")))
    assert f"checkpoint {newer.name} in '{job.save_dir}' is skipped" in third.output, third.story()
    assert third.final == undisturbed(PLAIN, 2).final, third.story()
    assert newer.exists()


def test_two_jobs_cannot_write_to_one_directory(start_ttprun: StartTtprun, tmp_path: Path) -> None:
    options = ["--save-dir", str(tmp_path / "save")]
    first = start_ttprun(PLAIN, 2, options=[*options, "--run-id", "the-first"], script_args=["--steps", "100000"])
    first.wait_for_line(0, "step 2 ")

    second = start_ttprun(PLAIN, 2, options=options).finish()

    assert second.exit_code == 2, second.story()
    assert "run 'the-first'" in second.output, second.story()


def flip_a_byte(path: Path) -> None:
    """Damage that no size tells."""
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
