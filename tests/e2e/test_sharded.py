"""Scripts whose parameters are sharded over the ranks: a rank is replaced from one that holds the same part, if any.

Otherwise all go back to what was stored.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_same_outcome
from ttprun import torch_versions
from ttprun.observe.status import read_topology

pytestmark = pytest.mark.skipif(
    torch_versions.release_of(torch.__version__) < (2, 7),
    reason="torch 2.6 itself cannot run fully_shard on the processor (CPU streams without record_event)",
)

TENSOR_PARALLEL = "tensor_parallel_mesh.py"
FSDP = "fsdp_model.py"  # 27 steps with 2 ranks, 9 an epoch
UNMIRRORED = ["--buddy", "off"]
SAID = re.compile(r"ranks 0, 1(, 2, 3)? each hold what no other rank holds: mirrored in [\d.]+ [KM]iB of memory")


def assert_as_undisturbed(run: Run, reference: Run) -> None:
    """It ended with the same weights, and what it has said is the same, but for what came out again."""
    assert (run.exit_code, run.final) == (0, reference.final), run.story()
    for rank, lines in reference.stdout.items():
        assert list(dict.fromkeys(run.stdout[rank])) == lines, run.story()


@pytest.mark.parametrize(("rank", "step", "phase"), [(0, 17, "collective")])
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
    ],
    ids=["short", "fsdp", "tensor parallel"],
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
