"""Each benchmark can be started; one that is ended leaves nothing running."""

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


def test_each_benchmark_finds_all_that_it_imports() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in BENCH.glob("*.py")}
    names = sorted(name for name, source in sources.items() if "\ndef main(" in source and "ArgumentParser(" in source)
    assert {"overhead", "recovery", "faults", "timeline", "bars"} <= set(names)
    environment = os.environ | {"PYTHONPATH": f"{BENCH}{os.pathsep}{BENCH.parent.parent}"}

    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert asked.returncode == 0, asked.stderr


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


IN_A_THREAD = """
import signal, sys, threading
from pathlib import Path
from runs import Run

def measure():
    with Run("torchrun", 1, Path(sys.argv[1]), within=("sh", "-c", "exec sleep 1000")) as run:
        print(run.process.pid, flush=True)
        run.process.wait()

threading.Thread(target=measure, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
threading.Event().wait()
"""


def test_a_run_that_a_thread_has_started_ends_with_its_process(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{BENCH}{os.pathsep}{BENCH.parent.parent}"}
    command = [sys.executable, "-c", IN_A_THREAD, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        launcher = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.terminate()
        assert benchmark.wait(30) == 143

    gone, _ = psutil.wait_procs([launcher], 30)
    assert gone == [launcher]
