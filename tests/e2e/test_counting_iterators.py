"""What a loop runs over may count for itself: it goes on as in the lost rank, or that is refused, and never differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "counting_iterators.py"
EXACT = [
    # manner, step: of the 16 and 20 steps over the chain's parts the 4th of the second one
    ("track", 13),
    ("chain", 20),
    ("generator", 13),
    ("object", 13),
    ("no loader", 13),
    ("accumulated", 4),  # of several batches a step, from a generator that counts for itself
    ("nested", 15),  # in a generator that runs over another one, which has begun anew
    ("slice", 24),  # in the loader's second round
]
RESUMED = ("track", "chain", "accumulated", "nested", "slice")


@pytest.mark.parametrize(
    ("manner", "step", "phase"),
    [*((manner, step, "backward") for manner, step in EXACT), ("nested", 15, "after_step")],
    ids=[*(f"{manner}-{step}" for manner, step in EXACT), "nested, where no loss shows it"],
)
def test_a_replacement_counts_on_where_the_lost_rank_had_counted_to(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, manner: str, step: int, phase: str
) -> None:
    args = ["--manner", manner]
    run = run_ttprun(SCRIPT, 2, faults=[f"kill:rank=1,step={step},phase={phase}"], script_args=args)

    assert_only_replaced(run)
    assert_same_outcome(run, undisturbed(SCRIPT, 2, args))


@pytest.mark.parametrize(("manner", "step"), [case for case in EXACT if case[0] in RESUMED])
def test_a_job_that_goes_on_from_a_checkpoint_counts_on_and_ends_where_it_would_have_ended(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, manner: str, step: int
) -> None:
    """All ranks replay here, so that there is none that could notice."""
    args = ["--manner", manner]
    how = {"options": ["--save-dir", str(tmp_path / "save")], "script_args": args, "out": tmp_path / "out"}
    first = run_ttprun(SCRIPT, 2, faults=[f"preempt:rank=1,step={step},phase=backward"], **how)
    second = run_ttprun(SCRIPT, 2, **how)

    assert first.exit_code == 143, first.story()
    second.stdout = {rank: first.stdout[rank] + second.stdout[rank] for rank in range(2)}
    assert_same_outcome(second, undisturbed(SCRIPT, 2, args))


def test_what_cannot_be_made_to_count_on_is_refused_by_its_place(run_ttprun: RunTtprun, tmp_path: Path) -> None:
    how = {
        "options": ["--save-dir", str(tmp_path / "save")],
        "script_args": ["--manner", "cycle"],
        "out": tmp_path / "out",
    }
    first = run_ttprun(SCRIPT, 2, faults=["preempt:rank=1,step=13,phase=backward"], **how)
    second = run_ttprun(SCRIPT, 2, **how)

    assert first.exit_code == 143, first.story()
    assert second.exit_code == 0, second.story()
    assert "the iterable of loop 1 around the step" in second.output, second.story()
    assert "is a cycle that gathers what it will hand out again" in second.output
