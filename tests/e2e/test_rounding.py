"""Kernels that round differently each time: a lost rank is replaced all the same, and replicas are equal bit by bit."""

from __future__ import annotations

import re

import pytest

from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_only_replaced, assert_survivors_kept_their_pids

SCRIPT = "rounds_differently.py"  # 16 steps
TO_ROUNDING = "equal to rounding"
BEFORE = "kill:rank=1,step=5,phase=before_step"


def losses(run: Run) -> list[float]:
    return [float(line.rpartition(" loss ")[2]) for line in run.stdout[0] if " loss " in line]


def found_equal(run: Run) -> str:
    return "; ".join(text for incident in run.incidents for text in incident["equal"])


def replaced(run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str, ranks: int = 2, device: str = "") -> Run:
    """A run in which ranks were lost, whose replicas are equal bit by bit, and whose losses are those of torchrun."""
    words, _, faults = case.partition(": ")
    reference = undisturbed(SCRIPT, ranks, words.split(), device=device)

    run = run_ttprun(SCRIPT, ranks, faults=faults.split(), script_args=words.split(), device=device)

    assert_only_replaced(run, len(faults.split()))
    assert_survivors_kept_their_pids(run)
    assert run.exit_code == 0, run.story()
    hashes = [re.sub(r"^\[rank \d\] ", "", line) for lines in run.hashes.values() for line in lines]
    assert (len(hashes), len(set(hashes))) == (ranks, 1), run.story()
    assert losses(run) == pytest.approx(losses(reference), rel=1e-3), run.story()
    return run


@pytest.mark.parametrize(
    "case",
    [
        f"--layout ddp --threads 2: {BEFORE} kill:rank=0,step=9,phase=before_step",
        f"--layout fsdp2 --threads 2: {BEFORE}",
    ],
)
def test_a_rank_whose_gradients_differ_by_rounding_is_replaced_and_the_incident_says_what_was_equal_to_rounding(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    run = replaced(run_ttprun, undisturbed, case)

    assert re.search(rf"\d inputs? of (a collective|collectives) in step 5, \d {TO_ROUNDING}", found_equal(run))


@pytest.mark.parametrize(
    "case",
    [
        "--layout ddp: kill:rank=1,step=5,phase=forward kill:rank=0,step=9,phase=in_step",
        "--layout own --noise forward: kill:rank=1,step=5,phase=collective kill:rank=0,step=9,phase=backward",
    ],
)
def test_with_noise_a_rank_is_replaced_wherever_it_is_lost(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    replaced(run_ttprun, undisturbed, case)


@pytest.mark.parametrize("case", [f"--device npu --layout own: {BEFORE}"])
def test_with_noise_on_a_device_a_rank_is_replaced(run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str) -> None:
    run = replaced(run_ttprun, undisturbed, case, device="npu")

    assert f"{TO_ROUNDING} (kernels of npu need not be reproducible)" in found_equal(run), run.story()


@pytest.mark.parametrize(
    "case",
    [
        f"--layout own --threads 2: {BEFORE} kill:rank=0,phase=gradients",
    ],
)
def test_a_rank_that_is_lost_while_gradients_are_passed_on_is_replaced_too(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    run = replaced(run_ttprun, undisturbed, case)

    assert "gradients of step 5, taken from rank 1" in found_equal(run) or "rank=1,phase" in case, run.story()


def test_one_thread_without_noise_is_held_to_bits(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    words = ["--layout", "own", "--noise", "none"]

    run = run_ttprun(SCRIPT, 2, faults=[BEFORE], script_args=words)

    assert_only_replaced(run)
    assert run.hashes == undisturbed(SCRIPT, 2, words).hashes, run.story()
    assert TO_ROUNDING not in found_equal(run)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param("--deterministic", "loss number 1 of step 5 differs from the lost rank's", id="deterministic"),
        pytest.param("--noise none", "other replacements have come to the same", id="once more"),
    ],
)
def test_what_differs_by_less_than_rounding_may_is_refused_where_arithmetic_is_reproducible(
    run_ttprun: RunTtprun, words: str, why: str
) -> None:
    words_and_drift = ["--layout", "own", *words.split(), "--drift", "1e-5"]

    run = run_ttprun(SCRIPT, 2, faults=[BEFORE], options=["--max-restarts", "1"], script_args=words_and_drift)

    assert why in run.incidents[0]["reason"], run.story()
    assert run.incidents[0]["rung"] != "replace", run.story()
