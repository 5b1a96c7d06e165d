"""The simulated NPU of the tests: a script that finds this folder on PYTHONPATH has it as torch_npu. See `on_path`.

`torch_npu/` is the device. It is never imported by the process of the tests themselves, whose torch it would change.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
COMPILE_LIMIT_S = 600.0


def on_path() -> str:
    """What to put on PYTHONPATH; compiles the device if need be. Skips the test where it cannot be compiled."""
    if why := _why_not():
        warnings.warn(pytest.PytestWarning(f"NOT TESTED on a device: {why}"), stacklevel=2)
        pytest.skip(why)
    return str(FOLDER)


@cache
def _why_not() -> str:
    command = [sys.executable, str(FOLDER / "torch_npu" / "build.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    if done.returncode == 3:
        return done.stderr.strip()
    assert done.returncode == 0, done.stderr
    return ""
