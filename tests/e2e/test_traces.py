"""`--trace` and `ttprun diff` on real runs: what a fault leaves in a trace, and which link a cause changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import EPOCHS, Run, environment

MOST_BYTES = 200  # of a step of a rank


def diff(first: Path, second: Path) -> tuple[int, list[str]]:
    """What `ttprun diff` exits with, and its lines."""
    words = [sys.executable, "-m", "ttprun", "diff", str(first), str(second)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment())
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_ranks_that_are_replaced_leave_the_same_chain_as_a_run_without_a_fault(
    run_ttprun: Callable[..., Run], tmp_path: Path
) -> None:
    """Killed before a step's line is written, after it, and inside the step; with validation and two workers."""
    faults = ["kill:rank=1,step=9,phase=backward", "kill:rank=0,step=16,phase=after_step", "kill:rank=1,step=30"]
    runs = {}
    for name, ordered in (("undisturbed", []), ("disturbed", faults)):
        runs[name] = run_ttprun(EPOCHS, 2, faults=ordered, options=["--trace", str(tmp_path / name)])

    assert [incident["rung"] for incident in runs["disturbed"].incidents] == ["replace"] * 3, runs["disturbed"].story()
    assert diff(tmp_path / "undisturbed", tmp_path / "disturbed") == (0, ["no difference in 43 steps of 2 ranks"])
    lines = [line for line in (tmp_path / "undisturbed").read_text().splitlines() if line[0] in "01"]
    assert max(map(len, lines)) <= MOST_BYTES
