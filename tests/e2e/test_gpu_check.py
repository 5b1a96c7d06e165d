"""The check for machines with a GPU, as far as one without can run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests import simulated_npu
from tests.e2e.harness import REPOSITORY, environment

CHECK = str(REPOSITORY / "scripts" / "gpu_check" / "check.py")
LIMIT_S = 900.0  # against a check that hangs: the longest takes 4 minutes, on busy cores more


def check(*options: str, **further: str) -> subprocess.CompletedProcess[str]:
    whole: Mapping[str, str] = {**environment(), **further}
    words = [sys.executable, CHECK, *options]
    return subprocess.run(words, env=whole, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_without_a_gpu_it_says_what_is_missing() -> None:
    done = check(CUDA_VISIBLE_DEVICES="")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check: error: no GPU: torch ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so run the check itself")
def test_on_the_processor_all_styles_recover_and_a_step_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.md"

    done = check("--device=cpu", "--repeats=1", "--steps=8", "--only", "styles", "step", "--report", str(report))

    assert done.stdout.count("ok      ") == 5, done.stdout + done.stderr
    assert done.stdout.count("weights identical") == 5
    assert done.stdout.endswith(f"all well\nthe report: {report}\n")
    assert done.returncode == 0
    text = report.read_text(encoding="utf-8")
    assert text.count("| kill | replace |") == 4
    assert "ttprun/torchrun | " in text
    assert "| a standby: on a GPU | none |" in text
    assert "* torch: " in text


def test_new_communicators_are_timed_and_the_error_of_a_lost_peer_is_known(tmp_path: Path) -> None:
    report = tmp_path / "report.md"

    done = check("--device=cpu", "--only", "communicators", "errors", "--report", str(report))

    assert done.stdout.count("ok      ") == 2, done.stdout + done.stderr
    assert done.returncode == 0
    text = report.read_text(encoding="utf-8")
    assert "| new communicator, 2 ranks, gloo, ms | " in text
    assert "Connection" in text
    assert text.count("| link |") == 1


def test_what_fails_or_is_not_begun_in_time_does_not_end_the_check(tmp_path: Path) -> None:
    words = ("--device=cpu", "--minutes=0.001", "--only", "communicators", "errors", "--report", str(tmp_path / "r.md"))

    done = check(*words)

    assert done.stdout.count("FAILED  ") == 2, done.stdout + done.stderr
    assert "FAILED  a peer is killed, gloo: not begun, as the time is up" in done.stdout
    assert "2 of 2 checks failed" in done.stdout
    assert done.returncode == 1


def test_on_the_simulated_npu_a_style_recovers_from_a_hang_and_from_failed_memory(tmp_path: Path) -> None:
    simulated_npu.on_path()

    done = check("--only", "faults", "--report", str(tmp_path / "report.md"), GPU_CHECK_DEVICE="npu")

    assert done.stdout.count("ok      ") == 2, done.stdout + done.stderr
    assert done.returncode == 0
