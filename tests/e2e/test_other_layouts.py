"""A checkpoint of two tensor-parallel ranks x two data-parallel ones is resumed with other numbers of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.harness import Run, RunTtprun, Undisturbed

SCRIPT = "tensor_parallel_mesh.py"
SAVED_AT = 8
LOSS = re.compile(r"\[rank (\d+)] step (\d+) loss ([\d.]+)")


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (8, 2)])
def test_ranks_of_another_layout_go_on_with_the_weights_and_with_the_data_of_their_place_in_it(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, ranks: int, tp: int
) -> None:
    options = ["--save-dir", str(tmp_path / "save")]
    fault = f"preempt:rank=0,step={SAVED_AT},phase=forward"
    run_ttprun(SCRIPT, 4, faults=[fault], options=options, script_args=["--tp", "2"])

    run = run_ttprun(SCRIPT, ranks, options=options, script_args=["--tp", str(tp)])

    assert run.exit_code == 0, run.story()
    assert "resumed from step 8" in run.output, run.story()
    losses, expected = losses_after(run), losses_after(undisturbed(SCRIPT, 4, script_args=["--tp", "2"]))
    assert losses.keys() == set(range(ranks))
    for rank, loss in losses.items():
        place = rank // tp
        if place < 2:  # this data was trained on by the old run's ranks, too
            assert loss == pytest.approx(expected[2 * place], abs=1e-5), run.story()
    assert all(loss == losses[rank - rank % tp] for rank, loss in losses.items()), run.story()
    apart = {loss for rank, loss in losses.items() if rank % tp == 0}
    assert len(apart) == ranks // tp, run.story()
    assert len({line.split()[-1] for lines in run.hashes.values() for line in lines}) == 1, run.story()


def losses_after(run: Run) -> dict[int, float]:
    """Of each rank, the loss of the first step after the checkpoint."""
    found = [LOSS.fullmatch(line) for lines in run.stdout.values() for line in lines]
    return {int(one[1]): float(one[3]) for one in found if one and int(one[2]) == SAVED_AT + 1}
