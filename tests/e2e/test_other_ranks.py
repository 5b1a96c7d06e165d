"""A run goes on from a checkpoint of another number of ranks, or of other arguments: scenario A25.

`counts_samples.py` counts in its weights how often each sample was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.harness import Run

RunTtprun = Callable[..., Run]
COUNTS = "counts_samples.py"


class Job:
    """Launches of one job, which may differ in their ranks and arguments."""

    def __init__(self, run_ttprun: RunTtprun, folder: Path) -> None:
        self._run = run_ttprun
        self._folder = folder

    def launch(self, script: str, ranks: int, args: Sequence[str] = (), **how: object) -> Run:
        """One launch."""
        options = ["--save-dir", str(self._folder / "save")]
        return self._run(script, ranks, script_args=args, options=options, out=self._folder / "out", **how)


@pytest.fixture
def job(run_ttprun: RunTtprun, tmp_path: Path) -> Job:
    return Job(run_ttprun, tmp_path)


def preempted(step: int) -> list[str]:
    return [f"preempt:rank=0,step={step},phase=backward"]


def assert_adapted(run: Run, boundary: int) -> None:
    """The launch went on from a checkpoint of that boundary, and came to its end."""
    resume = run.status["resume"]
    assert (resume["outcome"], resume["boundary"]) == ("recovered", boundary), run.story()
    assert run.exit_code == 0, run.story()
    assert "not bit-exact" in run.output, run.story()


@pytest.mark.parametrize(("old", "new"), [(2, 3)])
def test_every_sample_is_trained_on_once_an_epoch_but_for_the_padding_whatever_the_numbers_of_ranks(
    job: Job, old: int, new: int
) -> None:
    first = job.launch(COUNTS, old, faults=preempted(4))
    second = job.launch(COUNTS, new)

    boundary = first.status["checkpoint"]["boundary"]
    assert_adapted(second, boundary)
    counts = second.counts
    assert min(counts) == 2, second.story()
    left = 100 - boundary * 4 * old
    assert sum(counts) - 200 == -left % new + -100 % new, second.story()


@pytest.mark.parametrize(
    ("args", "each"),
    [
        (["--accumulate", "3"], 3),
    ],
    ids=["accumulate"],
)
def test_what_was_fetched_and_not_trained_on_is_dealt_out_anew(job: Job, args: list[str], each: int) -> None:
    first = job.launch(COUNTS, 2, args, faults=preempted(3))
    second = job.launch(COUNTS, 3, args)

    boundary = first.status["checkpoint"]["boundary"]
    assert_adapted(second, boundary)
    used = boundary * each * 4 * 2
    counts = second.counts
    assert sum(counts) == used + 3 * trained_on(100 - used, 3, each) + 3 * trained_on(100, 3, each), second.story()
    assert sum(count > 2 for count in counts) <= 4, second.story()  # 2 of padding in each of the two epochs


def trained_on(samples: int, ranks: int, each: int) -> int:
    """Samples that each rank trains on, in batches of 4 and steps of `each` batches; a rest is too small for a step."""
    of_rank = -(-samples // ranks)
    batches = [min(4, of_rank - begin) for begin in range(0, of_rank, 4)]
    return sum(batches[: len(batches) // each * each])
