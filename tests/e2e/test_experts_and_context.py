"""Expert parallelism (tokens by all_to_all, experts with one holder) and context parallelism (a ring of send and recv).

Ranks are lost in each part of a step; `validation` is an evaluation between its two micro-batches.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_same_outcome
from ttprun.observe.status import read_topology

EXPERTS = "mixture_of_experts.py"  # 20 steps
CONTEXT = "context_parallel.py"  # 20 steps
ALONE = "each hold what no other rank holds: mirrored in"
GROUPS = {
    (EXPERTS, ""): {"ep0": (0, 1, 2, 3)},
    (EXPERTS, "--replicas 2"): {"ep0": (0, 1), "ep1": (2, 3), "stride2_0": (0, 2), "stride2_1": (1, 3)},
    (CONTEXT, ""): {"cp0": (0, 1, 2, 3)},
    (CONTEXT, "--replicas 2"): {"cp0": (0, 1), "cp1": (2, 3)},
}


def assert_replaced(run: Run, reference: Run) -> None:
    """Ranks that are lost at once are in one incident or in two."""
    found = {(one["rung"], one["outcome"], one["steps_lost"]) for one in run.incidents}
    assert found == {("replace", "recovered", 0)}, run.story()
    assert_same_outcome(run, reference)


def groups_of(run: Run) -> dict[str, tuple[int, ...]]:
    return read_topology(run.folder / "run" / "topology.json").groups


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (EXPERTS, "kill:rank=1,step=9,phase=backward"),
        (CONTEXT, "kill:rank=1,step=9,phase=in_step"),
    ],
)
def test_of_two_ranks_that_exchange_tokens_one_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, fault: str
) -> None:
    run = run_ttprun(script, 2, faults=[fault])

    assert_replaced(run, undisturbed(script, 2))
    assert (ALONE in run.output) == (script == EXPERTS), run.story()
    assert groups_of(run) == {"ep0" if script == EXPERTS else "cp0": (0, 1)}


@pytest.mark.parametrize(
    ("script", "case"),
    [
        (EXPERTS, "--replicas 2: kill:rank=1,step=9,phase=backward kill:rank=2,step=9,phase=backward"),
        (CONTEXT, "--replicas 2: kill:rank=0,step=5,phase=forward kill:rank=1,step=9,phase=in_step"),
    ],
)
def test_of_four_ranks_that_exchange_tokens_several_are_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, case: str
) -> None:
    """Without replicas an expert has one holder; with them two, of which one is lost here."""
    words, _, faults = case.partition(": ")

    run = run_ttprun(script, 4, faults=faults.split(), script_args=words.split())

    assert_replaced(run, undisturbed(script, 4, words.split()))
    assert groups_of(run) == GROUPS[script, words]


def test_without_a_mirror_lost_experts_come_back_from_a_snapshot(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    options = ["--buddy", "off", "--snapshot-every", "5steps"]

    run = run_ttprun(EXPERTS, 2, faults=["kill:rank=1,step=13,phase=backward"], options=options)

    reference = undisturbed(EXPERTS, 2)
    assert [(one["rung"], one["outcome"]) for one in run.incidents] == [("rewind", "recovered")], run.story()
    assert (run.exit_code, run.final) == (0, reference.final), run.story()
    assert all(list(dict.fromkeys(run.stdout[rank])) == lines for rank, lines in reference.stdout.items()), run.story()
