"""What torch_npu has as `torch.npu`: the names and meanings of the real one, of release 2.13."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch_npu import build

_C = build.load()
_recovery = sys.modules[__name__]  # of torch_npu: names that this module has below
default_generators: tuple[torch.Generator, ...] = ()
OutOfMemoryError = torch.OutOfMemoryError
NAME = "simulated Ascend NPU (no hardware)"


# Devices.


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def device_count() -> int:
    """Devices of the node: SIMULATED_NPU_DEVICES, 8 unless it is set; ASCEND_RT_VISIBLE_DEVICES hides some."""
    count: int = _C.device_count()
    return count


def is_initialized() -> bool:
    """Whether this process has used a device."""
    return bool(_C.is_initialized()) and not _is_in_bad_fork()


def init() -> None:
    """Make this process a user of its device."""
    _C.init()


def _is_in_bad_fork() -> bool:
    return bool(_C.is_in_bad_fork())


def _index(device: Any = None) -> int:
    if isinstance(device, int) and device >= 0:
        return device
    named = torch.device(device) if isinstance(device, str) else device
    index = getattr(named, "index", None)
    return current_device() if index is None else int(index)


def current_device() -> int:
    """The index of this thread's device."""
    index: int = _C.current_device()
    return index


def set_device(device: Any) -> None:
    """Make it this thread's."""
    _C.set_device(_index(device))
    _C.state(_index(device))  # which makes a context


class device:
    """`with torch.npu.device(1):`"""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        _C.set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        _C.set_device(self.prev_idx)


def get_device_name(device: Any = None) -> str:
    """Says that it is simulated."""
    return NAME


class _Properties:
    def __init__(self, total_memory: int) -> None:
        self.name = NAME
        self.total_memory = total_memory
        self.multi_processor_count = 0


def get_device_properties(device: Any = None) -> _Properties:
    """Name and memory."""
    return _Properties(mem_get_info(device)[1])


def synchronize(device: Any = None) -> None:
    """Wait for all streams of a device."""
    _C.synchronize(_index(device))


# Streams.


class Stream(torch.Stream):
    """A stream of an NPU."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Stream:
        """A new one, or that which has these numbers."""
        if "stream_id" in named:
            return super().__new__(cls, **named)
        return super().__new__(cls, torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of an NPU."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        """Not yet recorded."""
        return super().__new__(cls, "npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _stream(found: torch.Stream) -> Stream:
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def current_stream(device: Any = None) -> Stream:
    """The stream on which this thread's work runs."""
    return _stream(torch.accelerator.current_stream(torch.device("npu", _index(device))))


def default_stream(device: Any = None) -> Stream:
    """The one that there is from the start."""
    where = torch.device("npu", _index(device))
    return Stream(
        stream_id=0, device_index=where.index, device_type=torch.accelerator.current_stream(where).device_type
    )


def set_stream(stream: torch.Stream) -> None:
    """Let this thread's work run on it."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(of: torch.Stream | None) -> Iterator[None]:
    """Let it run there for a while."""
    if of is None:
        yield
        return
    before_device, before = current_device(), current_stream(of.device_index)
    set_stream(of)
    try:
        yield
    finally:
        set_stream(before)
        _C.set_device(before_device)


# Graphs. What is given to the streams while one is captured runs when it is replayed.


class NPUGraph:
    """A captured graph."""

    __module__ = "torch_npu.npu.graphs"

    def capture_begin(self, *args: Any, **named: Any) -> None:
        """Of all streams of this process."""
        _C.begin_capture()

    def capture_end(self) -> None:
        """Keep what was captured."""
        self._graph = _C.end_capture()

    def replay(self) -> None:
        """Run it again."""
        self._graph.replay()


@contextmanager
def graph(npu_graph: NPUGraph, pool: Any = None, **_: Any) -> Iterator[None]:
    """Capture what is in the block."""
    synchronize()
    empty_cache()
    with stream(Stream()):
        npu_graph.capture_begin()
        try:
            yield
        finally:
            npu_graph.capture_end()


def make_graphed_callables(*args: Any) -> Any:
    """torch's own function for CUDA, with this device in its place: torch_npu has a copy of it."""
    over_this = SimpleNamespace(**vars(torch) | {"cuda": SimpleNamespace(**globals(), CUDAGraph=NPUGraph)})
    names = vars(torch.cuda.graphs) | {"torch": over_this, "graph_pool_handle": object}
    of_torch = torch.cuda.make_graphed_callables
    return FunctionType(of_torch.__code__, names, None, of_torch.__defaults__)(*args)


def is_current_stream_capturing() -> bool:
    """Whether a graph is being captured."""
    return bool(_C.is_capturing())


# Random numbers.


def _generator(device: Any = None) -> torch.Generator:
    global default_generators
    if not default_generators:
        default_generators = tuple(map(_C.default_generator, range(device_count())))
    return default_generators[_index(device)]


def manual_seed(seed: int) -> None:
    """Seed the generator of this thread's device."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed those of all devices."""
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed it with a random number."""
    _generator().seed()


def initial_seed() -> int:
    """The seed of this thread's device."""
    return _generator().initial_seed()


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    """State of a device's generator."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    """Put it back."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Put them back."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# Memory.


def empty_cache() -> None:
    """Give unused memory back."""
    if is_initialized():
        for index in range(device_count()):
            _C.empty_cache(index)


def memory_allocated(device: Any = None) -> int:
    """Bytes of tensors."""
    return int(_C.memory(_index(device))[0])


def memory_reserved(device: Any = None) -> int:
    """The same with unused memory."""
    return int(_C.memory(_index(device))[1])


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes of tensors so far."""
    return int(_C.memory(_index(device))[2])


def copied_to_host() -> tuple[int, int]:
    """Bytes that were copied from devices to the host so far, and in how many copies; only the simulated one counts."""
    counts: tuple[int, int] = _C.copied_to_host()
    return counts


def drains() -> int:
    """How often the host has waited for a device so far, also for the end of a copy; only the simulated one counts."""
    count: int = _C.drains()
    return count


def exposed() -> int:
    """Collectives whose end the host has awaited while the device had nothing to do; only the simulated one counts."""
    count: int = _C.exposed()
    return count


def _sleep(ms: float) -> None:
    """A kernel that takes so long, as torch.cuda._sleep."""
    _C.sleep(ms)


def _report_copies() -> None:
    """Append the counts to the file that SIMULATED_NPU_COPIES names."""
    with open(os.environ["SIMULATED_NPU_COPIES"], "a", encoding="utf-8") as report:
        report.write(f"{os.environ.get('RANK', '?')} {os.getpid()} {' '.join(map(str, copied_to_host()))}\n")


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count the most from now on."""
    _C.reset_peak(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    _, reserved, _, total = _C.memory(_index(device))
    return total - reserved - _C.memory_of_others(_index(device)), total


class _Runtime:
    """What torch.cuda.cudart() gives, of a device whose groups end as NCCL's do."""

    registered: ClassVar[dict[int, int]] = {}  # bytes from each address on

    @classmethod
    def cudaHostRegister(cls, address: int, size: int, flags: int) -> int:
        """Copies to and from this memory of the host need not be waited for at once, from now on."""
        _C.pin(address, size)
        cls.registered[address] = size
        return 0

    @classmethod
    def cudaHostUnregister(cls, address: int) -> None:
        """It is as any other memory again."""
        _C.unpin(address)
        del cls.registered[address]


def registered() -> int:
    """Bytes of memory that the host has registered with it; only the simulated one counts."""
    return sum(_Runtime.registered.values())


if _C.is_kind("nccl"):
    cudart = _Runtime


# Recovery.


_WATCHDOG_RUNS, _WATCHDOG_STOPS = 1, 2


def hccl_backends() -> list[Any]:
    """Of torch's process groups, as torch_npu finds them."""
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None or _C.is_kind("walk"):
        return []
    on = torch.device("npu")
    return [group._get_backend(on) for group in groups._pg_map if on in group._device_types]


def stop_device(device_id: int) -> int:
    """All tasks are aborted; 0, or 1 if that failed. Whatever is asked of the device raises FORCE STOP from then on."""
    answer: int = _C.stop_device(device_id)
    for backend in hccl_backends():
        backend.set_watchdog_status(_WATCHDOG_STOPS)
        backend.clear_workmeta_list()
    return answer


def restart_device(
    device_id: int, rebuild_all_resources: bool = False, disable_tensor_unsafe_check: bool = False
) -> None:
    """Memory that failed is repaired, and what was in it is unsafe; the device takes orders again."""
    _C.restart_device(device_id, disable_tensor_unsafe_check)
    if rebuild_all_resources and not disable_tensor_unsafe_check:
        _C.mark_all_unsafe(device_id)
    for backend in hccl_backends():
        backend.set_watchdog_status(_WATCHDOG_RUNS)
        backend.clear_workmeta_list()


def check_uce_in_memory(device_id: int) -> int:
    """0 none, 1 outside of the pool, 2 temporary, 3 persistent; always 3 after an HBM ECC error."""
    answer: int = _C.check_uce_in_memory(device_id)
    return answer


def _get_uce_addr() -> list[dict[str, int]]:
    return [{"ptr": ptr, "size": size} for ptr, size in _C.get_uce_addr(current_device())]


def check_npu_tensor_is_safe(tensor: torch.Tensor) -> bool:
    """Whether it was not in failed memory, or was marked since."""
    return bool(_C.is_safe(tensor))


def update_npu_tensor_to_safe(tensor: torch.Tensor) -> None:
    """It was written again."""
    _C.mark_safe(tensor)


def mark_all_npu_tensor_unsafe(device: int) -> None:
    """All that is in this device's memory."""
    _C.mark_all_unsafe(device)


# Mixed precision.


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may be asked for."""
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported() -> bool:
    """It is."""
    return True


atexit.register(_C.shutdown)
if os.environ.get("SIMULATED_NPU_COPIES"):
    atexit.register(_report_copies)
