"""The device of a process is what its script has loaded, and the processor otherwise."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from ttprun.device import interface
from ttprun.device.interface import Device, MemoryCheck
from ttprun.device.npu import NpuDevice


def test_without_an_accelerator_it_is_the_processor_which_needs_no_repair() -> None:
    device = interface.current()

    device.stop()
    device.clean()
    device.restart()
    device.rebuild_communicators()

    assert device.identify().kind == "cpu"
    assert device.health().is_usable
    assert device.check_memory() is MemoryCheck.NONE
    assert 0 < device.memory().free_bytes < device.memory().total_bytes


def test_an_npu_that_the_script_has_initialised_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    present = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=present))

    assert isinstance(interface.current(), NpuDevice)


def test_an_npu_that_nobody_has_initialised_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=absent))

    assert type(interface.current()) is Device


def test_nothing_is_imported_to_find_the_device() -> None:
    program = (
        "import sys; from ttprun.device import interface; kind = interface.current().identify().kind; "
        "sys.exit(kind != 'cpu' or any(name in sys.modules for name in ('torch', 'torch_npu', 'pynvml')))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
