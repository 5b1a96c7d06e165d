"""The interface of all devices, which is the CPU, and which one this process uses. Read `Device` first.

It is about the one device that this process uses. The phases of a repair are, in order: stop, check the memory, clean,
restart, rebuild the communicators, mark repaired tensors as safe.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from ttprun.device.device_errors import DeviceFault, Diagnosis, diagnosis_of


class DeviceMissingError(RuntimeError):
    """The device, or the library for it, cannot be used here. The message is one line: the cause; the cure."""


class DeviceFailedError(RuntimeError):
    """The device did not carry out an order; only a new process can help."""


class MemoryCheck(IntEnum):
    """Which memory has failed; the numbers are torch_npu's."""

    NONE = 0  # none is known to have failed
    OUTSIDE_POOL = 1  # it belongs to no tensor: not repairable
    TEMPORARY = 2  # unused after the cache is emptied
    PERSISTENT = 3  # used by living tensors


_FAULTS = {
    MemoryCheck.OUTSIDE_POOL: DeviceFault.MEMORY_OUTSIDE_POOL,
    MemoryCheck.TEMPORARY: DeviceFault.MEMORY_TEMPORARY,
    MemoryCheck.PERSISTENT: DeviceFault.MEMORY_PERSISTENT,
}


def refined(diagnosis: Diagnosis, check: MemoryCheck) -> Diagnosis:
    """The diagnosis of an error, given which memory has failed; NONE adds nothing."""
    fault = _FAULTS.get(check, diagnosis.fault)
    return diagnosis if fault is diagnosis.fault else diagnosis_of(fault)


@dataclass(frozen=True)
class Identity:
    """Which device this is.

    kind       "cpu", "cuda" or "npu"
    name       the model, from its driver
    index      number of the device in this process
    versions   of its libraries and driver, "" if unknown
    """

    kind: str
    name: str
    index: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Health:
    """Whether the device can be used.

    findings   sentences for an operator; a device that works may have some too
    """

    is_usable: bool
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryFigures:
    """Memory of the device, in bytes.

    free_bytes   available to any process
    """

    free_bytes: int
    total_bytes: int


class Device:
    """One kind of device, and what the machine's own processor and memory do, where failed memory ends the process.

    Methods may block until the device answers, seconds at most.
    """

    def identify(self) -> Identity:
        """Which device this is. Raises DeviceMissingError."""
        return Identity("cpu", platform.machine(), 0, {})

    def health(self) -> Health:
        """Whether it can be used; never raises. May wait for its running work."""
        return Health(is_usable=True)

    def stop(self) -> None:
        """End all its running work; operations of other threads fail from now on. Raises DeviceFailedError."""

    def check_memory(self) -> MemoryCheck:
        """Which memory has failed. Raises DeviceFailedError if the device cannot report it.

        An uncorrectable error of main memory is a SIGBUS, so there was none.
        """
        return MemoryCheck.NONE

    def clean(self) -> None:
        """Free unused memory."""

    def restart(self) -> None:
        """Make it ready for work after `stop`, without its communicators. Raises DeviceFailedError."""

    def rebuild_communicators(self) -> None:
        """Make the communicators of torch's own groups ready, in place, before `restart`. Raises DeviceFailedError.

        Groups of ours need none of that: they make new ones in each generation.
        """

    def mark_safe(self, tensor: Any) -> None:
        """A tensor in failed memory was written again, and may be used."""

    def memory(self) -> MemoryFigures:
        """Free and total memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryFigures(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)


# The device that this process's script has loaded; nothing is imported or initialized to find out.


def current() -> Device:
    """The device of this process; the CPU in forked children, and if no device was used."""
    torch: Any = sys.modules.get("torch")
    torch_npu: Any = sys.modules.get("torch_npu")
    if torch_npu is not None and torch_npu.npu.is_initialized():
        from ttprun.device.npu import NpuDevice

        reinit = getattr(torch.distributed, "reinit_process_group", None)
        return NpuDevice(torch_npu, torch_npu.npu.current_device(), reinit)
    has_gpu = torch is not None and torch.cuda.is_initialized()
    return _gpu(torch, torch.cuda.current_device()) if has_gpu else Device()


@cache
def _gpu(torch: Any, index: int) -> Device:
    """One per process, since each listens to the driver's events."""
    from ttprun.device import cuda

    return cuda.CudaDevice(torch, index, cuda.load_nvml())
