"""A benchmark that is ended leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
BENCHMARK = """
import sys
from pathlib import Path
from runs import Run

with Run("torchrun", 1, Path(sys.argv[1]), within=("sh", "-c", "exec sleep 1000")) as run:
    print(run.process.pid, flush=True)
    run.process.wait()
"""


def test_a_benchmark_that_gets_sigterm_ends_its_runs(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{BENCH}{os.pathsep}{BENCH.parent.parent}"}
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        launcher = int(benchmark.stdout.readline())
        benchmark.terminate()
        assert benchmark.wait(30) == 143

    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(launcher)
