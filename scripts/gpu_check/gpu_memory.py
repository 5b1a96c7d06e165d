"""Memory of the GPUs by NVIDIA's management library, which is there wherever a driver is; without a context of CUDA."""

from __future__ import annotations

import ctypes
from typing import Any


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMemory:
    """The first GPU's memory. Raises OSError if there is no library, or no GPU."""

    def __init__(self) -> None:
        self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle)):
            raise OSError("NVML knows no GPU")

    def used_mib(self) -> int:
        """MiB that are in use, by whomever."""
        memory = _Memory()
        if self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            raise OSError("NVML does not say how much memory is used")
        return int(memory.used >> 20)
