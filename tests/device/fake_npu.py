"""A module torch_npu without a device, with the signatures, return codes and error texts of one of three releases.

`ttprun/device/npu.py` is tested against it. What it does was taken from torch_npu's sources. Tensors are the CPU's:
a test that breaks one reports it with `fail_memory`. Whole jobs run on `tests/simulated_npu`, which has memory of its
own. Begin with `FakeNpu`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.device.device_errors import now_us
from ttprun.device.npu import NpuDevice

RELEASES = ("2.1.0.post8", "2.7.1", "2.13.0")
_NAME = "fake Ascend NPU (no hardware)"
_TOTAL_BYTES = 64 << 30


class Queue(IntEnum):
    """Where the queue of tasks stands; the numbers are torch_npu's."""

    RUN = 0
    UCE_EXIT = 5
    STOP_EXIT = 6
    HBM_ECC_EXIT = 7
    SUSPECT_MEM_EXIT = 8
    HCCS_LINK_EXIT = 9
    HCCL_OP_RETRY_EXIT = 10
    SUSPECT_REMOTE_EXIT = 11


# What an operation raises while the queue stands there; {} is when the memory failed, in microseconds.
TEXTS: dict[Queue, tuple[str, int]] = {
    Queue.UCE_EXIT: ("UCE ERROR", 507053),
    Queue.STOP_EXIT: ("FORCE STOP", 107022),
    Queue.HBM_ECC_EXIT: ("HBM MULTI BIT ECC ERROR.time us= {0}.time is {0}", 507054),
    Queue.SUSPECT_MEM_EXIT: ("SUSPECT MEM ERROR", 507055),
    Queue.HCCS_LINK_EXIT: ("HCCS LINK ERROR", 507056),
    Queue.HCCL_OP_RETRY_EXIT: ("HCCL OP RETRY FAILED", 507904),
    Queue.SUSPECT_REMOTE_EXIT: ("SUSPECT REMOTE ERROR", 507057),
}
_LOST = ("AclrtSynchronizeStreamWithTimeout", 507010)


def in_full(text: str, code: int) -> RuntimeError:
    """An error in the full shape of torch_npu's."""
    return RuntimeError(
        f"operator():fake NPU function error: {text}, error code is {code}\n"
        "[ERROR] 1970-01-01-00:00:00 (PID:0, Device:0, RankID:-1) ERR00100 PTA call acl api failed (fake)"
    )


class FakeTorchNpu:
    """Takes the place of the module torch_npu.

    release    one of RELEASES, whose signatures and return codes it has
    clock_us   the device's clock
    """

    def __init__(self, release: str = RELEASES[-1], clock_us: Callable[[], int] = now_us) -> None:
        self.__version__ = f"{release}+fake"
        self.version = SimpleNamespace(cann="fake")
        self.npu: Any = {RELEASES[0]: _Npu21, RELEASES[1]: _Npu27, RELEASES[2]: _Npu}[release](clock_us)

    def reinit_process_group(self, group: Any = None, rebuild_link: bool = True) -> Any:
        """torch.distributed.reinit_process_group: communicators that a stop has aborted work again."""
        return self.npu.reinit(group, rebuild_link)


class _Npu:
    """Takes the place of torch_npu.npu in release 2.13; the earlier ones below.

    queue      what any operation meets till the device is restarted
    has_ecc    an HBM ECC error was among what it met
    failed     (address, size) of memory that has failed
    rebuilt    what reinit_process_group was asked for: (group, rebuild_link)
    stops      how often it was stopped
    marked     how many tensors were marked as safe
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self.queue = Queue.RUN
        self.is_lost = self.has_ecc = False
        self.failed: list[tuple[int, int]] = []
        self.rebuilt: list[tuple[Any, bool]] = []
        self.stops = self.marked = 0
        self._clock_us = clock_us
        self._failed_at_us = 0
        self._holders: list[weakref.ref[Any]] = []
        self._outside: list[int] = []
        self._unsafe: dict[int, weakref.ref[Any]] = {}
        self._recovery = SimpleNamespace(update_npu_tensor_to_safe=self._mark_safe)

    # What breaks it.

    def fail_memory(self, tensor: Any, queue: Queue = Queue.UCE_EXIT) -> None:
        """The memory of a tensor has failed; it is persistent for as long as the tensor lives."""
        self.failed.append((tensor.data_ptr(), tensor.nbytes))
        self._holders.append(weakref.ref(tensor))
        self._failed_at_us = self._clock_us()
        self.queue = queue
        self.has_ecc = self.has_ecc or queue is Queue.HBM_ECC_EXIT

    def fail_memory_of_library(self, address: int = 0x1000, size: int = 32) -> None:
        """Memory has failed that is no tensor's: it is outside of torch_npu's pool."""
        self.failed.append((address, size))
        self._outside.append(address)
        self.queue = Queue.UCE_EXIT

    def lose(self) -> None:
        """The device does not answer any more."""
        self.is_lost = True

    def error(self) -> RuntimeError:
        """What an operation raises in the present state, in the full shape of torch_npu's errors."""
        text, code = _LOST if self.is_lost else TEXTS[self.queue]
        return in_full(text.format(self._failed_at_us), code)

    def operate(self, tensors: Iterable[Any] = ()) -> None:
        """Any operation on the device, with its inputs: raises what it meets."""
        if self.is_lost or self.queue is not Queue.RUN:
            raise self.error()
        if not all(self._is_safe(tensor) for tensor in tensors):
            raise RuntimeError("There is unsafe data in the input tensor")

    def _is_safe(self, tensor: Any) -> bool:
        """Memory that is given back and taken again is safe."""
        holder = self._unsafe.get(tensor.data_ptr())
        return holder is None or holder() is None

    def _mark_safe(self, tensor: Any) -> None:
        self._unsafe.pop(tensor.data_ptr(), None)
        self.marked += 1

    def reinit(self, group: Any, rebuild_link: bool) -> Any:
        """What reinit_process_group of this release does and answers; links are resumed before a restart."""
        if not rebuild_link and self.stops and self.queue is not Queue.STOP_EXIT:
            raise RuntimeError("HcclCommResume after the device was restarted")
        self.rebuilt.append((group, rebuild_link))
        return (group or "default group") if rebuild_link else None

    # torch_npu.npu.

    def is_initialized(self) -> bool:
        """The process uses it."""
        return True

    def current_device(self) -> int:
        """There is one."""
        return 0

    def is_available(self) -> bool:
        """Whether there is a device that answers."""
        return not self.is_lost

    def get_device_name(self, device_id: int) -> str:
        """Says that it is simulated."""
        return _NAME

    def synchronize(self, device_id: int) -> None:
        """As any operation."""
        self.operate()

    def stop_device(self, device_id: int) -> int | None:
        """All tasks are aborted; 0, or 1 if that failed."""
        if self.is_lost:
            return 1
        self.stops += 1
        self.queue = Queue.STOP_EXIT
        return 0

    def restart_device(
        self, device_id: int, rebuild_all_resources: bool = False, disable_tensor_unsafe_check: bool = False
    ) -> None:
        """Memory that failed is repaired, and what was in it is unsafe; new streams are not simulated."""
        if self.is_lost:
            raise self.error()
        assert not rebuild_all_resources
        if not disable_tensor_unsafe_check:
            self._unsafe |= {held.data_ptr(): ref for ref in self._holders if (held := ref()) is not None}
        self.failed, self._holders, self._outside = [], [], []
        self.queue, self.has_ecc = Queue.RUN, False

    def check_uce_in_memory(self, device_id: int) -> int:
        """0 none, 1 outside of the pool, 2 temporary, 3 persistent; always 3 after an HBM ECC error."""
        if self.is_lost:
            raise self.error()
        if self.has_ecc:
            return 3
        if not self.failed:
            return 0
        if self._outside:
            return 1
        return 3 if any(holder() is not None for holder in self._holders) else 2

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def mem_get_info(self, device_id: int) -> tuple[int, int]:
        """Nothing is used."""
        return _TOTAL_BYTES, _TOTAL_BYTES


class _Npu27(_Npu):
    """Release 2.7."""

    def restart_device(self, device_id: int, rebuild_all_resources: int = False) -> None:  # type: ignore[override]
        super().restart_device(device_id, bool(rebuild_all_resources))


class _Npu21(_Npu27):
    """Release 2.1."""

    def stop_device(self, device_id: int) -> None:
        super().stop_device(device_id)

    def reinit(self, group: Any, rebuild_link: bool) -> None:
        super().reinit("default group" if rebuild_link else None, rebuild_link)


class FakeNpu(NpuDevice):
    """`npu.py` on a fake torch_npu.

    module   the fake, to break it
    """

    def __init__(self, release: str = RELEASES[-1], clock_us: Callable[[], int] = now_us) -> None:
        self.module = FakeTorchNpu(release, clock_us)
        super().__init__(self.module, 0, self.module.reinit_process_group)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this process's device be this one."""
        monkeypatch.setitem(sys.modules, "torch_npu", self.module)
        monkeypatch.setattr("torch.distributed.reinit_process_group", self.module.reinit_process_group, raising=False)
