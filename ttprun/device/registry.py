"""The device that this process's script has loaded; nothing is imported or initialized to find out."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from ttprun.device.cpu import CpuDevice
from ttprun.device.interface import Device


def current() -> Device:
    """The device of this process; the CPU in forked children, and if no device was used."""
    torch: Any = sys.modules.get("torch")
    torch_npu: Any = sys.modules.get("torch_npu")
    if torch_npu is not None and torch_npu.npu.is_initialized():
        from ttprun.device.npu import NpuDevice

        reinit = getattr(torch.distributed, "reinit_process_group", None)
        return NpuDevice(torch_npu, torch_npu.npu.current_device(), reinit)
    if torch is not None and torch.cuda.is_initialized():
        return _gpu(torch, torch.cuda.current_device())
    return CpuDevice()


@cache
def _gpu(torch: Any, index: int) -> Device:
    """One per process, since each listens to the driver's events."""
    from ttprun.device import nvml
    from ttprun.device.cuda import CudaDevice

    return CudaDevice(torch, index, nvml.load())
