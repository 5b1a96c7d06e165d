"""The check for machines with a GPU, as far as one without can run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import REPOSITORY, environment

CHECK = str(REPOSITORY / "scripts" / "gpu_check" / "check.py")
LIMIT_S = 1200.0  # against a check that hangs: the longest takes 5 minutes, on busy cores more


def check(report: Path, *options: str, **further: str) -> subprocess.CompletedProcess[str]:
    whole: Mapping[str, str] = {**environment(), **further}
    words = [sys.executable, CHECK, "--minutes=18", "--patience=8", "--report", str(report), *options]
    return subprocess.run(words, env=whole, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def rows_of(report: Path) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))["rows"]}


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    done = check(tmp_path / "report.md", CUDA_VISIBLE_DEVICES="")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check: error: no GPU: torch ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so run the check itself")
def test_on_the_processor_a_kill_in_each_phase_is_replaced_and_steps_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.md"

    done = check(report, "--device=cpu", "--beside=2", "--only", "C", "F", "G")

    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(report)
    kills = [row for what, row in rows.items() if ": kill:" in what]
    assert len(kills) == 8
    assert all(row["found"].startswith("replace (") for row in kills)
    assert all(row["found"].endswith("weights identical") for row in kills)
    assert rows["a step, ddp"]["values"]["ratio"] > 0
    warm = rows["killed in backward, the standby was ready"]["values"]
    assert warm["incident"]["rung"] == "replace"
    assert warm["gap_s"] > warm["step_s"]
