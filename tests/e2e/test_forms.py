"""Scripts made of parts (forms.py): with any two of them together ranks are lost and replaced, and nothing differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e import forms
from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome
from tests.e2e.test_checkpoints import Series, assert_resumed, assert_saved
from ttprun import torch_versions

pytestmark = pytest.mark.skipif(
    torch_versions.release_of(torch.__version__) < (2, 7),
    reason="torch 2.6 itself cannot run fully_shard on the processor (CPU streams without record_event)",
)

ROWS = {", ".join(row.values()): row for row in forms.rows()}


@pytest.mark.parametrize("name", list(ROWS))
def test_a_script_of_any_two_parts_loses_two_ranks_which_are_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, name: str
) -> None:
    script, ranks, kills = forms.write(ROWS[name], tmp_path / "script")
    device = "npu" if ROWS[name]["device"] == "npu" else ""
    reference = undisturbed(script, ranks, device=device)

    run = run_ttprun(script, ranks, faults=kills, device=device)

    assert_only_replaced(run, incidents=2)
    assert_same_outcome(run, reference)


@pytest.mark.parametrize("spread", ["fsdp1"])
def test_a_job_of_fsdp1_that_is_ended_in_mid_step_is_resumed_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, spread: str
) -> None:
    """Its flat parameters are the whole then; what is saved is each rank's part."""
    script, ranks, _ = forms.write(forms.row_of(spread=spread), tmp_path / "script")
    series = Series(run_ttprun, tmp_path, script, ranks)

    saved = series.launch(["preempt:rank=0,step=6,phase=backward"])
    resumed = series.launch()

    assert_saved(saved, "ended")
    assert_resumed(resumed, 6)
    assert_same_outcome(series.as_one(), undisturbed(script, ranks))
