"""The job of two tiny ranks that `ttprun doctor` runs on a machine's devices: here on the simulated NPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import simulated_npu
from ttprun.chaos.trial.twins import Launch, Twin
from ttprun.cli.doctor import ON_THE_CPU, Pair, pair_of, repair

LIMIT_S = 240.0  # importing torch on a busy machine


def device(kind: str, index: int, is_usable: bool = True) -> dict[str, Any]:
    return {"kind": kind, "index": index, "is_usable": is_usable}


@pytest.mark.slow
def test_on_the_simulated_npu_two_ranks_share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", simulated_npu.on_path(), prepend=os.pathsep)
    shared = pair_of({"devices": [device("npu", 0)]})
    assert shared is not None

    (found,) = repair("2.13.0", shared, LIMIT_S)

    assert (found.area, found.level) == ("devices", "ok"), found
    assert found.found.startswith("a killed rank was replaced in ")
    assert found.found.endswith(" s (npu 0, hccl)")


def test_one_device_that_two_ranks_cannot_share_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(launch: Launch, folder: Path) -> Twin:
        started.append(list(launch.command[1:]))
        return Twin(folder, 1, 0.1, {}, "AcceleratorError: CUDA error 46")

    monkeypatch.setattr(Launch, "run", run)

    pairs = [Pair("cuda", (0, 0)), Pair("cuda", (0, 1)), Pair("npu", (0, 0)), ON_THE_CPU]
    findings = [finding for pair in pairs for finding in repair("2.13.0", pair)]

    assert [one.level for one in findings] == ["note", "fails", "fails", "fails"]
    said = "on torch 2.13.0 (cuda 0, nccl): the job of two tiny ranks: AcceleratorError: CUDA error 46"
    assert findings[0].found == said
    assert started[:2] == [["cuda", "nccl", "0", "0"], ["cuda", "nccl", "0", "1"]]


def test_two_ranks_have_a_device_each_where_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [device("cuda", 0, is_usable=False), device("cuda", 1), device("cuda", 2)]

    assert pair_of({"devices": gpus}) == Pair("cuda", (1, 2))
    assert pair_of({"devices": gpus[:2]}) == Pair("cuda", (1, 1))
    assert pair_of({"devices": []}) is None
    assert pair_of({"error": "no torch"}) is None
    assert str(Pair("cuda", (1, 2))) == "cuda 1 and 2, nccl"
