"""The GPU by way of stand-ins for torch and pynvml with their interface. No GPU is here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttprun.device import cuda
from ttprun.device.cuda import CudaDevice
from ttprun.device.device_errors import DeviceErrors
from ttprun.device.interface import DeviceFailedError, DeviceMissingError, MemoryCheck

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'")


class FakeCuda:
    """Takes the place of torch.cuda on a machine with one GPU.

    sticky   what every call raises once a kernel has failed
    """

    def __init__(self) -> None:
        self.sticky: RuntimeError | None = None
        self.is_there = True
        self.nccl = SimpleNamespace(version=lambda: (2, 26, 2))

    def is_available(self) -> bool:
        return self.is_there

    def get_device_name(self, index: int) -> str:
        return "NVIDIA H100"

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid="11111111-2222-3333-4444-555555555555")

    def synchronize(self, index: int) -> None:
        if self.sticky is not None:
            raise self.sticky

    def empty_cache(self) -> None:
        self.synchronize(0)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 60, 80


class FakeBackend:
    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class FakeGroup:
    """A process group with a backend for CUDA, or for the processor alone."""

    def __init__(self, backend: FakeBackend | None) -> None:
        self.backend = backend

    def _get_backend(self, device: Any) -> FakeBackend:
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


class FakeTorch:
    """Takes the place of the module torch."""

    uint8 = torch.uint8
    version = SimpleNamespace(cuda="12.8")

    def __init__(self, groups: tuple[FakeGroup, ...] = ()) -> None:
        self.cuda = FakeCuda()
        world = SimpleNamespace(pg_map=dict.fromkeys(groups))
        self.distributed = SimpleNamespace(
            is_nccl_available=lambda: True, distributed_c10d=SimpleNamespace(_world=world)
        )

    def frombuffer(self, raw: bytearray, dtype: Any) -> torch.Tensor:
        return torch.frombuffer(raw, dtype=dtype)

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device(kind, index)


class FakeNvml:
    """Takes the place of the module pynvml: its functions, constants and errors, as nvidia-ml-py 13 has them."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, has_events: bool = True, has_ecc: bool = True) -> None:
        self.has_events, self.has_ecc = has_events, has_ecc
        self.waiting: list[int] = []
        self.uncorrected = 0
        self.rows = (0, 0, 0, 0)
        self.asked_for = ""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked_for = uuid
        if uuid.startswith("MIG-"):
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.124"

    def nvmlEventSetCreate(self) -> str:
        if not self.has_events:
            raise self.NVMLError
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, events: str) -> None:
        assert (handle, types, events) == ("handle", 8, "events")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.waiting:
            raise self.NVMLError("Timeout")
        return SimpleNamespace(eventData=self.waiting.pop(0))

    def nvmlDeviceGetTotalEccErrors(self, handle: str, error_type: int, counter_type: int) -> int:
        if not self.has_ecc:
            raise self.NVMLError("Not Supported")
        assert (error_type, counter_type) == (1, 0)
        return self.uncorrected

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return self.rows


def test_a_gpu_says_what_drives_it() -> None:
    management = FakeNvml()

    found = CudaDevice(FakeTorch(), 0, management).identify()

    assert (found.kind, found.name) == ("cuda", "NVIDIA H100")
    assert found.versions == {"CUDA": "12.8", "driver": "570.124", "NCCL": "2.26.2"}
    assert management.asked_for == "GPU-11111111-2222-3333-4444-555555555555"


def test_a_machine_whose_gpu_is_not_found_is_reported_with_the_cure() -> None:
    fake = FakeTorch()
    fake.cuda.is_there = False

    with pytest.raises(DeviceMissingError, match="check that the driver is loaded and CUDA_VISIBLE_DEVICES is right"):
        CudaDevice(fake, 0).identify()


def test_a_sticky_error_makes_the_process_unfit_for_repair_and_others_do_not() -> None:
    fake = FakeTorch()
    device = CudaDevice(fake, 0)
    before = device.check_memory()
    fake.cuda.sticky = ILLEGAL

    health = device.health()
    with pytest.raises(DeviceFailedError, match="the context of GPU 0 is lost"):
        device.restart()

    assert before is MemoryCheck.NONE
    assert not health.is_usable
    assert health.findings == ("CUDA answers: RuntimeError: CUDA error: an illegal memory access was encountered",)
    assert DeviceErrors({}).diagnose(ILLEGAL).rung == "replace"
    assert not DeviceErrors({}).diagnose(RuntimeError("CUDA error: invalid argument")).is_known


def test_a_gpu_whose_counters_are_clean_is_healthy() -> None:
    assert CudaDevice(FakeTorch(), 0, FakeNvml()).health() == CudaDevice(FakeTorch(), 0).health()


@pytest.mark.parametrize(
    ("xid", "is_usable", "reported"),
    [(79, False, "Xid 79: it has fallen off the bus"), (94, True, "Xid 94: an ECC error that was contained"),
     (999, True, "Xid 999: see NVIDIA's Xid catalog")],
)  # fmt: skip
def test_an_xid_is_reported_in_words(xid: int, is_usable: bool, reported: str) -> None:
    management = FakeNvml()
    device = CudaDevice(FakeTorch(), 0, management)
    management.waiting.append(xid)

    health = device.health()
    again = device.health()

    assert health.is_usable is is_usable
    assert health.findings[0].startswith(reported)
    assert again == health  # an event is handed out once, and stays true


def test_ecc_errors_and_remapped_rows_are_reported() -> None:
    management = FakeNvml()
    management.uncorrected, management.rows = 2, (0, 3, 1, 1)

    health = CudaDevice(FakeTorch(), 0, management).health()

    assert not health.is_usable
    assert [finding.partition(":")[0] for finding in health.findings] == [
        "2 uncorrectable ECC errors since the driver was loaded",
        "rows of its memory wait for a reset to be remapped (nvidia-smi --gpu-reset)",
        "a row of its memory could not be remapped",
    ]


def test_a_gpu_without_events_and_ecc_is_no_worse_for_it() -> None:
    management = FakeNvml(has_events=False, has_ecc=False)

    assert CudaDevice(FakeTorch(), 0, management).health().is_usable


def test_a_part_of_a_gpu_that_nvml_refuses_works_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, management = FakeTorch(), FakeNvml()
    monkeypatch.setattr(fake.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="MIG-1111"))

    health = CudaDevice(fake, 0, management).health()

    assert management.asked_for == "MIG-1111"
    assert health.is_usable
    assert health.findings == ("NVML refuses this GPU (part of one, by MIG?): ECC and Xid errors are not named",)


def test_communicators_are_aborted_where_there_are_any() -> None:
    backends = FakeBackend(), FakeBackend()
    groups = FakeGroup(backends[0]), FakeGroup(None), FakeGroup(backends[1])
    device = CudaDevice(FakeTorch(groups), 0)

    device.stop()

    assert [backend.is_aborted for backend in backends] == [True, True]


def test_memory_is_the_gpus_own() -> None:
    fake = FakeTorch()
    device = CudaDevice(fake, 0)

    assert (device.memory().free_bytes, device.memory().total_bytes) == (60, 80)


def test_without_the_management_library_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)

    assert cuda.load_nvml() is None
