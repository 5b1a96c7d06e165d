"""`ttprun check` on real scripts: one that is recovered exactly, and one that is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.e2e.harness import SCRIPTS, ttprun


def check(
    folder: Path, script: str, *words: str, options: tuple[str, ...] = (), ranks: int = 2
) -> tuple[int, dict[str, Any]]:
    """Check a test script in a working folder of its own; returns the exit code and the report."""
    folder.mkdir()
    shutil.copy(SCRIPTS / script, folder / script)
    done = ttprun("check", "--json", *options, f"--nproc-per-node={ranks}", script, *words, folder=folder)
    assert done.stdout, done.stderr
    assert [path.name for path in folder.iterdir()] == [script], "the check has written into the user's folder"
    return done.returncode, json.loads(done.stdout)


def test_a_script_that_is_recovered_is_found_exact_at_each_moment(tmp_path: Path) -> None:
    code, report = check(tmp_path / "project", "plain_tensors.py")

    assert report["problem"] == ""
    assert report["differences"] == []
    assert {(row["result"], row["rung"]) for row in report["rows"]} == {("exact", "replace")}
    assert {row["rank"] for row in report["rows"]} == {0, 1}
    assert {row["phase"] for row in report["rows"]} == {
        "setup", "backward", "collective", "before_step", "in_step", "after_step",
    }  # fmt: skip
    assert code == 0


def test_a_script_that_cannot_be_replayed_is_refused_with_the_reason_and_the_cure(tmp_path: Path) -> None:
    code, report = check(tmp_path / "project", "second_time.py", "--kind", "data", options=("--steps", "4"))

    refused = [row for row in report["rows"] if row["result"] == "refused"]
    assert any("batch" in row["detail"] for row in refused), report
    assert any("let dataset and sampler give the same" in row["cure"] for row in refused), report
    assert code == 1
