"""An NVIDIA GPU by way of torch.cuda; ECC and Xid by way of NVML, if nvidia-ml-py is installed.

Most errors of a kernel are sticky: the context is lost with all memory, and whatever this process asks of CUDA fails
from then on. So nothing is repaired in place but communicators: the table sends the rest to a new process. Not run in
this project's own tests, which have no GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ttprun.device import nvml
from ttprun.device.device_errors import in_one_line
from ttprun.device.interface import DeviceFailedError, DeviceMissingError, Health, Identity, MemoryCheck, MemoryFigures


class CudaDevice:
    """One GPU.

    torch         the module, with CUDA
    index         number of the GPU in this process
    nvml_module   pynvml, initialised; None: it is not here
    """

    def __init__(self, torch: Any, index: int, nvml_module: Any = None) -> None:
        self._torch = torch
        self._index = index
        self._gpu: nvml.Gpu | None = None
        if nvml_module is not None:
            with contextlib.suppress(nvml_module.NVMLError):
                self._gpu = nvml.Gpu(nvml_module, str(torch.cuda.get_device_properties(index).uuid))

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

    def mark_safe(self, tensor: Any) -> None:
        """No tensor is ever unsafe."""

    def rng_state(self) -> bytes:
        """State of the GPU's generator."""
        state: bytes = self._torch.cuda.get_rng_state(self._index).numpy().tobytes()
        return state

    def restore_rng_state(self, state: bytes) -> None:
        """Put it back."""
        torch = self._torch
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), self._index)

    def memory(self) -> MemoryFigures:
        """Memory of the GPU."""
        return MemoryFigures(*self._torch.cuda.mem_get_info(self._index))
