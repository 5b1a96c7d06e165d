"""The simulated NPU of the tests, in a process of its own, since it changes what torch is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import simulated_npu

LIMIT_S = 300.0
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_does_what_a_real_one_would() -> None:
    run_there("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/simulated_npu/cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nccl,gate,load", "nccl,lock,null"])
def test_what_is_in_the_way_on_a_real_one_is_in_the_way_on_it(kind: str) -> None:
    run_there("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/simulated_npu/cases.py", kind=kind)


def run_there(*arguments: str, kind: str = "") -> None:
    """Run Python with the device. AssertionError if that fails."""
    path = os.pathsep.join([simulated_npu.on_path(), os.environ.get("PYTHONPATH", "")])

    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SIMULATED_NPU_KIND": kind},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
