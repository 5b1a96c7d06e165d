"""Two ranks that `ttprun doctor` sends to the devices: real processes, over gloo and on the simulated NPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import simulated_npu
from ttprun.cli import device_check
from ttprun.cli.device_check import MEANS, Pair, devices_at_work, pair_of, try_pair

ON_THE_CPU = Pair("cpu", (0, 0))
LIMIT_S = 240.0  # importing torch on a busy machine


def device(kind: str, index: int, is_usable: bool = True) -> dict[str, Any]:
    return {"kind": kind, "index": index, "is_usable": is_usable}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not left


def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have both ranks run this program; its rank is sys.argv[1]."""
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(device_check, "RANKS", f"exec(open({str(tmp_path / 'program.py')!r}).read()) # {{!r}}")


def test_on_the_cpu_all_that_a_recovery_needs_is_tried_and_works() -> None:
    findings = list(try_pair(ON_THE_CPU, LIMIT_S))

    assert [(one.subject, one.level) for one in findings] == [(f"gloo: {what}", "ok") for what in MEANS]
    assert "its loss is seen after" in findings[-1].found


@pytest.mark.slow
def test_on_the_simulated_npu_two_ranks_share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", simulated_npu.on_path(), prepend=os.pathsep)

    findings = list(devices_at_work({"devices": [device("npu", 0)]}, LIMIT_S))

    assert [(one.subject, one.level) for one in findings] == [(f"HCCL: {what}", "ok") for what in MEANS]
    assert "two ranks on npu 0" in findings[0].found


def test_what_never_answers_is_ended_at_the_limit_and_its_row_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = '{"what": "connection", "found": "0.1 s", "is_well": true}'
    doubles(tmp_path, monkeypatch, f"import signal; print({said!r}, flush=True); signal.pause()")

    connection, barrier = try_pair(ON_THE_CPU, 5.0)

    assert (connection.level, barrier.level) == ("ok", "fails")
    assert (barrier.subject, barrier.found) == ("gloo: barrier", "no answer within 5 s")
    assert barrier.means == "scripts with a barrier do not run"


def test_a_rank_that_crashes_is_reported_with_its_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "import os, sys; print('RuntimeError: no such device', file=sys.stderr, flush=True); os.abort()"
    doubles(tmp_path, monkeypatch, crash)

    (finding,) = try_pair(ON_THE_CPU, LIMIT_S)

    assert finding.level == "fails"
    assert finding.found == "the process has ended: exit code -6: RuntimeError: no such device"


def test_one_device_that_two_ranks_cannot_share_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = '{"what": "connection", "found": "AcceleratorError: CUDA error 46", "is_well": false}'
    doubles(tmp_path, monkeypatch, f"print({said!r})")

    (shared,) = try_pair(Pair("cuda", (0, 0)), LIMIT_S)
    (apart,) = try_pair(Pair("cuda", (0, 1)), LIMIT_S)

    assert (shared.level, apart.level) == ("note", "fails")
    assert shared.found == "two ranks on cuda 0, NCCL over sockets: AcceleratorError: CUDA error 46"


def test_two_ranks_have_a_device_each_where_there_are_two() -> None:
    gpus = [device("cuda", 0, is_usable=False), device("cuda", 1), device("cuda", 2)]

    assert pair_of({"devices": gpus}) == Pair("cuda", (1, 2))
    assert pair_of({"devices": gpus[:2]}) == Pair("cuda", (1, 1))
    assert pair_of({"devices": []}) is None
    assert list(devices_at_work({"error": "no torch"})) == []


def test_ranks_that_share_a_gpu_are_two_machines_to_nccl_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setenv("RANK", "7")  # of an outer launcher

    shared = [device_check._environment(Pair("cuda", (0, 0)), number) for number in (0, 1)]
    apart = device_check._environment(Pair("cuda", (0, 1)), 1)

    assert [one["NCCL_HOSTID"] for one in shared] == ["0", "1"]
    assert "NCCL_HOSTID" not in apart
    assert "RANK" not in apart
    assert apart["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
