"""A30 in short: random faults in random ranks at random moments; the long soak is scripts/soak.py itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import REPOSITORY, environment

LIMIT_S = 900.0


def test_fifteen_random_faults_are_all_seen_and_repaired_and_nothing_differs(tmp_path: Path) -> None:
    words = ["--faults", "15", "--seed", "11", "--ranks", "3", "--json", str(tmp_path / "soak.json")]

    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "soak.py"), *words, "--folder", str(tmp_path / "runs")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert (figures["ordered"], figures["injected"], figures["accounted_for"]) == (15, 15, 15)
    assert figures["rungs"].keys() == {"replace"}
    assert figures["steps_lost"] == 0
    assert figures["identical_runs"] == figures["runs"] == 3
