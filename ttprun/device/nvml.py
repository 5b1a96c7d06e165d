"""NVIDIA's management library reports what CUDA does not: Xid events, ECC counters, remapped rows.

It is optional (`pip install 'ttprun[cuda]'`; its module is `pynvml`). Read XIDS first.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

# Xid -> what it says, and whether the GPU can be used afterwards (by a new process) without a reset of it.
# Source: NVIDIA's Xid catalog, docs.nvidia.com/deploy/xid-errors.
XIDS: dict[int, tuple[str, bool]] = {
    13: ("an exception of the graphics engine, mostly an error of the script", True),
    31: ("a page fault of the GPU, mostly an error of the script", True),
    43: ("the GPU stopped processing for this process", True),
    45: ("a clean-up after another error", True),
    48: ("an uncorrectable ECC error", False),
    62: ("its internal micro-controller halted", False),
    63: ("a row of its memory will be remapped at the next reset", True),
    64: ("a row of its memory could not be remapped", False),
    74: ("an error of NVLink", False),
    79: ("it has fallen off the bus", False),
    92: ("a high rate of ECC errors that were corrected", True),
    94: ("an ECC error that was contained in one process", True),
    95: ("an ECC error that was not contained", False),
    119: ("its system processor does not answer", False),
    120: ("its system processor failed", False),
}


def load() -> Any:
    """The module pynvml, initialised; None if it is not installed, or if there is no driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # its errors are of its own base class, which is not there if it is not
        return None
    return nvml


class Gpu:
    """One GPU, from now on: Xids that came before are not seen.

    uuid    from CUDA, with or without its prefix; CUDA_VISIBLE_DEVICES changes device numbers, but no uuid
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self._xids: list[int] = []
        self._events: Any = None
        with contextlib.suppress(nvml.NVMLError):  # not every GPU and not every container has events
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def driver(self) -> str:
        """Version of the driver."""
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def xids(self) -> tuple[int, ...]:
        """All Xids since this object was made; does not wait."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):  # a time-out: there is none more
            while self._events is not None:
                self._xids.append(int(nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
        return tuple(self._xids)

    def findings(self) -> Iterator[tuple[str, bool]]:
        """What is wrong with the GPU, each with whether it can still be used; nothing if all is well."""
        nvml = self._nvml
        for xid in self.xids():
            meaning, is_usable = XIDS.get(xid, ("see NVIDIA's Xid catalog", True))
            yield f"Xid {xid}: {meaning}", is_usable
        with contextlib.suppress(nvml.NVMLError):
            uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            count = nvml.nvmlDeviceGetTotalEccErrors(self._handle, uncorrected, nvml.NVML_VOLATILE_ECC)
            if count:
                yield f"{count} uncorrectable ECC errors since the driver was loaded", True
        with contextlib.suppress(nvml.NVMLError):
            _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(self._handle)
            if is_pending:
                yield "rows of its memory wait for a reset to be remapped (nvidia-smi --gpu-reset)", True
            if has_failed:
                yield "a row of its memory could not be remapped: have it replaced", False
