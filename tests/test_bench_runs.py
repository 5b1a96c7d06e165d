"""Each benchmark can be started; one that is ended leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{BENCH}{os.pathsep}{BENCH.parent.parent}"}


def test_each_benchmark_finds_all_that_it_imports() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in BENCH.glob("*.py")}
    names = sorted(name for name, source in sources.items() if "\ndef main(" in source and "ArgumentParser(" in source)
    assert {"overhead", "recovery", "faults", "timeline", "bars"} <= set(names)

    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    asked = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)

    assert asked.returncode == 0, asked.stderr
