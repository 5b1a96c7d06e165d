"""`--trace` and `ttprun diff` on real runs: what a fault leaves in a trace, and which link a cause changes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.e2e.harness import EPOCHS, SCRIPTS, Launch, Run, StartTtprun, command

MOST_BYTES = 200  # of a step of a rank


def diff(first: Path, second: Path) -> tuple[int, list[str]]:
    """What `ttprun diff` exits with, and its lines."""
    return command(first.parent, "diff", str(first), str(second))


def test_ranks_that_are_replaced_leave_the_same_chain_as_a_run_without_a_fault(
    run_ttprun: Callable[..., Run], tmp_path: Path
) -> None:
    """Killed before a step's line is written, after it, and inside the step; with validation and two workers."""
    faults = ["kill:rank=1,step=9,phase=backward", "kill:rank=0,step=16,phase=after_step", "kill:rank=1,step=30"]
    runs = {}
    for name, ordered in (("undisturbed", []), ("disturbed", faults)):
        runs[name] = run_ttprun(EPOCHS, 2, faults=ordered, options=["--trace", str(tmp_path / name)])

    assert [incident["rung"] for incident in runs["disturbed"].incidents] == ["replace"] * 3, runs["disturbed"].story()
    assert diff(tmp_path / "undisturbed", tmp_path / "disturbed") == (0, ["no difference in 42 steps of 2 ranks"])
    lines = [line for line in (tmp_path / "undisturbed").read_text().splitlines() if line[0] in "01"]
    assert max(map(len, lines)) <= MOST_BYTES


def trace_of(folder: Path, ranks: int, cause: str = "") -> Path:
    """The trace of a run of planted_causes.py."""
    trace = folder / f"{ranks}{cause or 'none'}.trace"
    options = ["--nproc-per-node", str(ranks), "--trace", str(trace), "--standbys", "0"]
    words = ["--cause", cause, "--save", str(folder / f"{ranks}.pt")]
    code, output = command(folder, *options, str(SCRIPTS / "planted_causes.py"), *words)
    assert code == 0, output
    return trace


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of ranks: the trace of a run without any cause."""
    folder = tmp_path_factory.mktemp("traces")
    return {ranks: trace_of(folder, ranks) for ranks in (1, 2)}


CAUSES = {
    "seed": "step 0: other random numbers from the start: the seed",
    "sampler": "step 0: other samples in the batch: the sampler: its kind, its seed or its epoch",
    "workers": "step 0: another batch of the same samples: *num_workers of the DataLoader * 2 instead of 0",
    "augmentation": "step 0: another batch of the same samples: the data, its augmentation, *",
    "evaluation": "step 8: other random numbers before the batch is loaded: an evaluation with dropout *",
    "kernel": "step 12*: same *: kernel*",  # by rounding: on some CPUs one of the losses is the same
    "threads": "step *: same *: kernel*; threads of torch: 4 instead of 1",
    "weight": "step 12{}: same weights after step 11, other ones now: something else than the optimizer has *",
    "skipped": "step 12: 2/1 batches/losses instead of 1/1: a batch was skipped, *",
    "clipping": "step 12: same gradients after the backward pass, other ones when the optimizer takes them: clipping *",
    "accumulation": "step 12: 2/2 batches/losses instead of 1/1: accumulation",
    "resume": "step 6: other samples in the batch: the order of the data after a resume",
}


@pytest.mark.parametrize(
    ("cause", "ranks"), [*((cause, 2) for cause in CAUSES), ("weight", 1), ("clipping", 1), ("resume", 1)]
)
def test_the_link_that_a_planted_cause_changes_first_is_named(
    references: dict[int, Path], cause: str, ranks: int
) -> None:
    """With one rank there is no process group."""
    code, lines = diff(references[ranks], trace_of(references[ranks].parent, ranks, cause))

    expected = CAUSES[cause].format(", rank 1" if ranks > 1 else "")
    assert fnmatch(lines[-1], expected.replace("[", "[[]")), lines
    assert code == 1


def test_a_script_is_checked_against_a_golden_trace(references: dict[int, Path]) -> None:
    """The golden one is of a run without a check's own seeds: what a script neither seeds nor draws does not count."""
    said = {}
    words = ["--against", str(references[2]), "--steps", "14", "--nproc-per-node", "2", "--in-place"]
    for cause in ("", "weight", "sampler"):
        to_check = ("check", *words, str(SCRIPTS / "planted_causes.py"), "--cause", cause)
        code, lines = command(references[2].parent, *to_check)
        said[cause] = code, lines[0][:40]

    assert said[""] == (0, "no difference in 14 steps of 2 ranks")
    assert said["weight"] == (1, "step 12, rank 1: same weights after step")
    assert said["sampler"] == (1, "step 0: other samples in the batch: the ")


def test_a_job_that_is_preempted_and_resumes_leaves_the_same_chain(start_ttprun: StartTtprun, tmp_path: Path) -> None:
    """One process without a process group; what it neither seeds nor draws has other states in its second process."""

    def launch(name: str) -> Launch:
        options = ["--save-dir", str(tmp_path / name), "--trace", str(tmp_path / f"{name}.trace")]
        words = ["--gate", str(tmp_path / "gate")]
        return start_ttprun("each_for_itself.py", 1, options=options, script_args=words, out=tmp_path / f"{name}.out")

    preempted = launch("twice")
    preempted.wait_for_line(0, "step 10 ")
    preempted.process.send_signal(signal.SIGTERM)
    first = preempted.finish()
    for step in range(10, 41):
        (tmp_path / f"gate{step}").touch()
    runs = [launch(name).finish() for name in ("twice", "once")]

    assert [first.exit_code, *(run.exit_code for run in runs)] == [143, 0, 0], first.story()
    assert runs[0].status["resume"]["boundary"] == 10, runs[0].story()
    assert diff(tmp_path / "once.trace", tmp_path / "twice.trace") == (0, ["no difference in 40 steps of 1 rank"])
