"""The simulated NPU of the tests, in a process of its own, since it changes what torch is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import simulated_npu

LIMIT_S = 300.0
REPOSITORY = Path(__file__).resolve().parents[2]


def test_it_does_what_a_real_one_would() -> None:
    path = os.pathsep.join([simulated_npu.on_path(), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/simulated_npu/cases.py"]

    done = subprocess.run(
        [*command, "-n", "0"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
