"""Which device this process uses, as its script has loaded it: nothing is imported or initialised to find out."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from ttprun.device.cpu import CpuDevice
from ttprun.device.interface import Device

_simulated: Device | None = None


def current() -> Device:
    """The device of this process. Forked children and processes that have not touched a device have the processor."""
    torch: Any = sys.modules.get("torch")
    torch_npu: Any = sys.modules.get("torch_npu")
    if _simulated is not None:
        return _simulated
    if torch_npu is not None and torch_npu.npu.is_initialized():
        from ttprun.device.npu import NpuDevice

        reinit = getattr(torch.distributed, "reinit_process_group", None)
        return NpuDevice(torch_npu, torch_npu.npu.current_device(), reinit)
    if torch is not None and torch.cuda.is_initialized():
        return _gpu(torch, torch.cuda.current_device())
    return CpuDevice()


@cache
def _gpu(torch: Any, index: int) -> Device:
    """One a process: each listens for what the driver tells of it."""
    from ttprun.device import nvml
    from ttprun.device.cuda import CudaDevice

    return CudaDevice(torch, index, nvml.load())


def simulate(device: Device | None) -> None:
    """From now on this is the process's device; None: whatever it really has."""
    global _simulated
    _simulated = device
