"""An Ascend NPU through torch_npu. Never run on one: written from its sources, and tested against a simulation.

torch_npu differs between releases, see NAMES. 2.1: `stop_device` returns None. 2.7: it returns 0 or 1. 2.13:
`restart_device` has a third argument, which we do not use. Missing functions are not called.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from ttprun.device.device_errors import DeviceErrors, in_one_line
from ttprun.device.interface import (
    Device,
    DeviceFailedError,
    DeviceMissingError,
    Health,
    Identity,
    MemoryCheck,
    MemoryFigures,
)

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

# What ttprun uses of torch_npu -> the first release that has it, of those that were read: the wheels of 2.6.0, 2.7.1,
# 2.8.0, 2.9.0 and 2.14.0. Functions, then texts of errors, then variables of the environment. None has gone since.
NAMES: dict[str, str] = {
    **dict.fromkeys(("is_available", "is_initialized", "device_count", "current_device"), "2.6.0"),
    **dict.fromkeys(("get_device_name", "mem_get_info", "synchronize", "empty_cache"), "2.6.0"),
    **dict.fromkeys(("stop_device", "restart_device", "check_uce_in_memory", "_recovery"), "2.6.0"),
    **dict.fromkeys(("update_npu_tensor_to_safe", "reinit_process_group", "abort_hccl_comm"), "2.6.0"),
    **dict.fromkeys(("UCE ERROR", "HBM MULTI BIT ECC", "SUSPECT MEM ERROR", "FORCE STOP"), "2.6.0"),
    **dict.fromkeys(("HCCL OP RETRY FAILED", "HCCS LINK ERROR"), "2.6.0"),
    "SUSPECT REMOTE ERROR": "2.7.1",
    "UB LINK ERROR": "2.14.0",
    **dict.fromkeys(("HCCL_ASYNC_ERROR_HANDLING", "HCCL_DESYNC_DEBUG"), "2.6.0"),
    **dict.fromkeys(("TORCH_HCCL_ENABLE_MONITORING", "TORCH_HCCL_DUMP_ON_TIMEOUT"), "2.6.0"),
    "TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2.6.0",
    **dict.fromkeys(("TORCH_HCCL_ASYNC_ERROR_HANDLING", "TORCH_HCCL_DESYNC_DEBUG"), "2.14.0"),
}


def load() -> Any:
    """The module torch_npu; torch must have been imported.

    Raises DeviceMissingError, one line: it is not installed, or CANN is not there, or there is no NPU it can use.
    """
    try:
        return importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            raise DeviceMissingError("torch_npu is not installed; for an NPU: pip install 'ttprun[npu]'") from None
        raise DeviceMissingError(why_not_loaded(error)) from error
    except (ImportError, RuntimeError) as error:
        raise DeviceMissingError(why_not_loaded(error)) from error


def why_not_loaded(error: BaseException) -> str:
    """One line for an operator: torch_npu is installed, and cannot be imported."""
    return (
        f"torch_npu is installed, but cannot be loaded ({in_one_line(error)}); install CANN and "
        f"'source set_env.sh', or uninstall torch_npu, or set {AUTOLOAD}=0: without that 'import torch' itself fails"
    )


class NpuDevice(Device):
    """One NPU.

    torch_npu   the module
    index       number of the device in this process
    reinit      torch.distributed.reinit_process_group, which torch_npu puts there
    """

    kind = "npu"

    def __init__(self, torch_npu: Any, index: int, reinit: Callable[..., Any] | None) -> None:
        self._torch_npu = torch_npu
        self._npu = torch_npu.npu
        self._index = index
        self._reinit = reinit

    def identify(self) -> Identity:
        """The NPU's model. Raises DeviceMissingError."""
        if not self._npu.is_available():
            raise DeviceMissingError("torch_npu finds no NPU; see 'npu-smi info' and ASCEND_RT_VISIBLE_DEVICES")
        versions = {"torch_npu": str(self._torch_npu.__version__)}
        with contextlib.suppress(AttributeError):
            versions["CANN"] = str(self._torch_npu.version.cann)
        name = str(self._npu.get_device_name(self._index))
        return Identity(self.kind, name, self._index, versions)

    def health(self) -> Health:
        """Waits for what runs on the NPU."""
        try:
            self._npu.synchronize(self._index)
        except Exception as error:
            return Health(False, (f"{DeviceErrors({}).diagnose(error).fault}: {in_one_line(error)}",))
        return Health(True)

    def stop(self) -> None:
        """Abort all tasks; the process's other threads get "FORCE STOP" from then on.

        Raises DeviceFailedError if it does not answer well.
        """
        answer = self._call("stop_device", self._index)
        if answer not in (None, 0):
            raise DeviceFailedError(f"stop_device answers {answer} for NPU {self._index}")

    def check_memory(self) -> MemoryCheck:
        """Which memory has failed; torch_npu empties its cache to find out what is still held.

        Raises DeviceFailedError if it does not answer well.
        """
        answer = self._call("check_uce_in_memory", self._index)
        try:
            return MemoryCheck(answer)
        except ValueError:
            raise DeviceFailedError(f"check_uce_in_memory answers {answer} for NPU {self._index}") from None

    def clean(self) -> None:
        """Empty the cache."""
        self._npu.empty_cache()

    def restart(self) -> None:
        """Repair the memory that failed, and take orders again."""
        self._call("restart_device", self._index)

    def rebuild_communicators(self) -> None:
        """Resume all groups at once, over the links that they have; before `restart`, as MindSpeed-LLM does.

        Raises DeviceFailedError if torch_npu cannot.
        """
        if self._reinit is None:
            raise DeviceFailedError(f"torch_npu {self._torch_npu.__version__} has no reinit_process_group")
        self._reinit(group=None, rebuild_link=False)

    def mark_safe(self, tensor: Any) -> None:
        """Without this the use of a tensor whose memory had failed raises "unsafe data in the input tensor"."""
        mark = getattr(getattr(self._npu, "_recovery", None), "update_npu_tensor_to_safe", None)
        if mark is not None:
            mark(tensor)

    def memory(self) -> MemoryFigures:
        """Memory of the NPU."""
        return MemoryFigures(*self._npu.mem_get_info(self._index))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """One of torch_npu's functions for recovery; whatever it raises, the device has failed."""
        function = getattr(self._npu, name, None)
        if function is None:
            raise DeviceFailedError(f"torch_npu {self._torch_npu.__version__} has no {name}")
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise DeviceFailedError(f"{name} failed for NPU {self._index} ({in_one_line(error)})") from error
