"""A few of the suites that nobody here wrote; all of them: scripts/conformance.sh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import REPOSITORY, environment

LIMIT_S = 900.0


def test_tests_of_pythons_own_pass_between_steps_under_ttprun_as_under_torchrun(tmp_path: Path) -> None:
    words = [str(REPOSITORY / "scripts" / "conformance" / "conformance.py"), "--quick"]

    done = subprocess.run(
        [sys.executable, *words, "--results", str(tmp_path / "results.json")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for suite in json.loads((tmp_path / "results.json").read_text()).values():
        assert suite["differences"] == []
        assert suite["ttprun"] == suite["torchrun"]
        assert suite["steps"] > 2 * suite["ttprun"]["passed"]
