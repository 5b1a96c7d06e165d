"""Each benchmark can be started; one that is ended leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{BENCH}{os.pathsep}{BENCH.parent.parent}"}
MEASURE = """
import sys
from pathlib import Path
from runs import Run

def measure():
    with Run("torchrun", 1, Path(sys.argv[1]), within=("sh", "-c", "exec sleep 1000")) as run:
        print(run.process.pid, flush=True)
        run.process.wait()

measure()
"""


def test_each_benchmark_finds_all_that_it_imports() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in BENCH.glob("*.py")}
    names = sorted(name for name, source in sources.items() if "\ndef main(" in source and "ArgumentParser(" in source)
    assert {"overhead", "recovery", "faults", "timeline", "bars"} <= set(names)

    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    asked = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)

    assert asked.returncode == 0, asked.stderr


def test_a_benchmark_that_gets_sigterm_ends_its_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        launcher = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.terminate()
        assert benchmark.wait(30) == 143

    gone, _ = psutil.wait_procs([launcher], 30)
    assert gone == [launcher]
