"""`ttprun drill` with real twins: identical, different, and a fault that never strikes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, ttprun

SCENARIO = """\
script: {script}
arguments: ["--out={{folder}}/out"]
launch: {{nproc_per_node: 2}}
compare: [out/final.pt]
rungs: [replace]
faults:
"""


def drill(folder: Path, script: Path, *faults: str) -> tuple[int, dict[str, Any]]:
    """Run a drill; returns its exit code and its report."""
    text = SCENARIO.format(script=script) + "".join(f"  - {fault}\n" for fault in faults)
    (folder / "scenario.yaml").write_text(text)
    done = ttprun("drill", "scenario.yaml", "--json", "--folder", str(folder / "runs"), folder=folder)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("fault", ["kill:rank=1,step=10,phase=collective"])
def test_a_drill_of_a_script_that_recovers_is_identical_and_pairs_the_fault(tmp_path: Path, fault: str) -> None:
    code, report = drill(tmp_path, SCRIPTS / "plain_tensors.py", fault)

    assert report["problems"] == []
    assert {one["is_identical"] for one in report["comparisons"]} == {True}
    assert [one["what"] for one in report["comparisons"]] == ["out/final.pt", "output of rank 0", "output of rank 1"]
    assert [(one["fault"], one["incident"], one["rung"]) for one in report["injections"]] == [(fault, 1, "replace")]
    assert report["injections"][0]["detect_s"] > 0
    assert code == 0


def test_the_demonstration_ends_with_the_weights_of_torchrun_and_shows_both_hashes() -> None:
    done = ttprun("demo")

    assert done.returncode == 0, done.stdout + done.stderr
    by_torchrun, by_ttprun = (line.split()[-1] for line in done.stdout.splitlines()[-2:])
    assert by_torchrun == by_ttprun
    assert "kill strikes rank 1 in step 30" in done.stderr
