"""An NVIDIA GPU by way of torch.cuda; ECC and Xid by way of NVML, if nvidia-ml-py is installed.

Most errors of a kernel are sticky: the context is lost with all memory, and whatever this process asks of CUDA fails
from then on. So nothing is repaired in place but communicators: the table sends the rest to a new process. Not run in
this project's own tests, which have no GPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from ttprun.device.device_errors import in_one_line
from ttprun.device.interface import (
    Device,
    DeviceFailedError,
    DeviceMissingError,
    Health,
    Identity,
    MemoryCheck,
    MemoryFigures,
)

# NVIDIA's management library reports what CUDA does not: Xid events, ECC counters, remapped rows. It is optional (`pip
# install 'ttprun[cuda]'`; its module is `pynvml`).

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


def load_nvml() -> Any:
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
        is_whole = uuid.startswith(("GPU-", "MIG-"))
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if is_whole else f"GPU-{uuid}")
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


class CudaDevice(Device):
    """One GPU.

    torch         the module, with CUDA
    index         number of the GPU in this process
    nvml_module   pynvml, initialised; None: it is not here
    """

    def __init__(self, torch: Any, index: int, nvml_module: Any = None) -> None:
        self._torch = torch
        self._index = index
        self._gpu: Gpu | None = None
        self._has_nvml = nvml_module is not None
        if nvml_module is not None:
            with contextlib.suppress(nvml_module.NVMLError):
                self._gpu = Gpu(nvml_module, str(torch.cuda.get_device_properties(index).uuid))

    def identify(self) -> Identity:
        """The GPU's model. Raises DeviceMissingError."""
        torch = self._torch
        if not torch.cuda.is_available():
            raise DeviceMissingError(
                "torch finds no GPU; check that the driver is loaded and CUDA_VISIBLE_DEVICES is right"
            )
        versions = {"CUDA": str(torch.version.cuda or ""), "driver": "" if self._gpu is None else self._gpu.driver()}
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        return Identity("cuda", torch.cuda.get_device_name(self._index), self._index, versions)

    def health(self) -> Health:
        """Waits for the GPU's running work, since a kernel's error is reported only then."""
        findings = [] if self._gpu is None else list(self._gpu.findings())
        if self._has_nvml and self._gpu is None:
            findings.append(("NVML refuses this GPU (part of one, by MIG?): ECC and Xid errors are not named", True))
        try:
            self._torch.cuda.synchronize(self._index)
        except Exception as error:
            findings.append((f"CUDA answers: {in_one_line(error)}", False))
        return Health(all(is_usable for _, is_usable in findings), tuple(finding for finding, _ in findings))

    def stop(self) -> None:
        """CUDA cannot end a kernel; those that wait for a peer end when their communicators are aborted."""
        self.rebuild_communicators()

    def check_memory(self) -> MemoryCheck:
        """An uncorrectable error of the GPU's memory is sticky: a context that lives has met none.

        Raises DeviceFailedError if it is lost.
        """
        try:
            self._torch.cuda.synchronize(self._index)
        except Exception as error:
            raise DeviceFailedError(f"the context of GPU {self._index} is lost ({in_one_line(error)})") from error
        return MemoryCheck.NONE

    def clean(self) -> None:
        """Give cached blocks back to the driver."""
        self._torch.cuda.empty_cache()

    def restart(self) -> None:
        """A context cannot be made anew in the same process: this only says whether it lives."""
        self.check_memory()

    def rebuild_communicators(self) -> None:
        """Abort NCCL's communicators; a group connects anew when it is used next.

        Without an abort its kernels, and later work on the stream, may wait for ever.
        """
        for group in tuple(self._torch.distributed.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # a group without a backend for CUDA
                group._get_backend(self._torch.device("cuda", self._index)).abort()

    def memory(self) -> MemoryFigures:
        """Memory of the GPU."""
        return MemoryFigures(*self._torch.cuda.mem_get_info(self._index))
