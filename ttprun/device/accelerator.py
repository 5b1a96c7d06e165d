"""The accelerator that this process uses, by torch's device module: the same code for CUDA, XPU and NPU.

Nothing is imported or initialized to find it: what a script has not used has no state. Begin with `in_use`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_MOST_DEVICES = 16  # of a node, of whose generators the states are recorded
NEEDED = (  # of a device's module; a backend for a device that lacks any of it is left to torch
    *("is_initialized", "device_count", "current_device", "set_device", "synchronize", "get_rng_state"),
    *("set_rng_state", "Event", "Stream", "stream", "current_stream"),
)

_LOOK_AGAIN_S = 50e-6  # at a copy of a few MiB, which takes some 300 us

has_graphs = False  # one was captured here: what they write when they run is counted nowhere

_own_streams: dict[int, Any] = {}  # by the number of a device; one process has one


def in_use() -> tuple[str, Any] | None:
    """(type of the device, its module) if this process has used one; else None."""
    torch: Any = sys.modules.get("torch")
    try:  # several times a step: plain lines
        name = torch._C._get_privateuse1_backend_name()
        if name != "privateuseone":
            module = getattr(torch, name, None)
            is_initialized = getattr(module, "is_initialized", None)
            if is_initialized is not None and is_initialized():
                return name, module
        if torch.cuda.is_initialized():
            return "cuda", torch.cuda
        if torch.xpu.is_initialized():
            return "xpu", torch.xpu
    except AttributeError:  # torch is not imported, or only in part
        return None
    return None


def missing_of(device_type: str) -> str:
    """What the module of a type of device lacks, of all that is called here: its name, or "" if it is complete."""
    module: Any = getattr(sys.modules["torch"], device_type, None)
    return "" if device_type == "cpu" else next((name for name in NEEDED if not hasattr(module, name)), "")


def current_index() -> int | None:
    """The number of this thread's device; None if no device is in use."""
    device = in_use()
    return None if device is None else int(device[1].current_device())


def use(index: int | None) -> None:
    """This thread works on the device of this number; each thread begins with the first one. None: nothing changes."""
    device = in_use()
    if device is not None and index is not None:
        device[1].set_device(index)


def synchronize() -> None:
    """Wait until the device of this thread has done all its work. Raises the device's error."""
    device = in_use()
    if device is not None:
        device[1].synchronize()


def mark() -> Any:
    """An event after all that this thread has given its current stream to do; None if no device is in use."""
    device = in_use()
    if device is None:
        return None
    event = device[1].Event()
    event.record()
    return event


def make_context(index: int) -> None:
    """Make this process a user of the device before its script does, which takes seconds on a GPU.

    No memory is allocated and no library's handle is made: they read variables that the script may still set.
    Raises the device's error.
    """
    module: Any = getattr(sys.modules["torch"], sys.modules["torch"].accelerator.current_accelerator().type)
    module.init()
    with module.device(index):
        module.synchronize()


def current_stream() -> Any:
    """The stream of this thread's device on which it works; None if no device is in use."""
    device = in_use()
    return None if device is None else device[1].current_stream()


def on(stream: Any) -> AbstractContextManager[Any]:
    """What this thread gives the device inside goes to that stream of `current_stream`."""
    device = in_use()
    return nullcontext() if device is None or stream is None else device[1].stream(stream)


def beside(event: Any = None) -> AbstractContextManager[Any]:
    """What this thread gives the device inside goes to a stream of ours, and waits for none of the script's.

    event   of `mark`, of the same device, after which it runs; None: what it uses is there
    """
    device = in_use()
    if device is None:
        return nullcontext()
    module, index = device[1], int(device[1].current_device())
    if index not in _own_streams:
        _own_streams[index] = module.Stream(index)
    if event is not None:
        event.wait(_own_streams[index])
    return module.stream(_own_streams[index])  # type: ignore[no-any-return]


def finish_here(limit_s: float | None = None) -> None:
    """Wait until what this thread has given its current stream is done. Raises the device's error.

    limit_s   after which TimeoutError is raised; None: waits as long as it takes
    """
    event = mark()
    if event is None:
        return
    if limit_s is None:
        event.synchronize()
        return
    end_s = time.monotonic() + limit_s
    while not event.query():
        if time.monotonic() > end_s:
            raise TimeoutError(f"the device has not done its work within {limit_s:.0f} s")
        time.sleep(_LOOK_AGAIN_S)


def pin(address: int, size_bytes: int) -> bool:
    """Let CUDA copy to this memory of the host by itself, which is several times as fast; returns whether it can.

    A quarter of a second for each GiB or more, without the GIL; to be undone by `unpin` before the memory is unmapped.
    """
    device = in_use()
    runtime = None if device is None else getattr(device[1], "cudart", None)
    return runtime is not None and int(runtime().cudaHostRegister(address, size_bytes, 0)) == 0


def unpin(address: int) -> None:
    """Undo `pin`."""
    device = in_use()
    if device is not None:
        device[1].cudart().cudaHostUnregister(address)


def wait_on(event: Any) -> None:
    """What this thread gives its current stream from now on runs after the event. Does not block."""
    event.wait()


def use_here(tensor: Any) -> None:
    """The current stream reads a tensor that another one has made: its memory is not given away before that."""
    if (stream := current_stream()) is not None:
        tensor.record_stream(stream)


def is_capturing() -> bool:
    """Whether this thread's work is being captured in a graph, which the script then runs without our hooks."""
    device = in_use()
    ask = getattr(device[1], "is_current_stream_capturing", None) if device is not None else None
    return ask is not None and bool(ask())


def unclaimed_bytes() -> int:
    """Bytes that are free on this thread's device, less what this process has held at once there and given back since.

    0 if no device is in use. An allocator that was short of memory keeps nothing of what the script takes each step.
    """
    device = in_use()
    if device is None:
        return 0
    module = device[1]
    free, _ = module.mem_get_info()
    return max(0, int(free) - max(0, int(module.max_memory_allocated()) - int(module.memory_reserved())))


def mps_control() -> str:
    """Where CUDA's Multi-Process Service takes orders for this process's GPUs; "" if none runs."""
    pipe = os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control")
    return pipe if os.path.exists(pipe) else ""


def has_loaded(library: str) -> bool:
    """Whether a shared library whose file begins so is in this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any(os.path.basename(line.rstrip()).startswith(library) for line in maps)


def random_states() -> tuple[str, list[bytes]] | None:
    """(type of device, state of each device's generator); None if no device is in use."""
    device = in_use()
    if device is None:
        return None
    device_type, module = device
    count = min(module.device_count(), _MOST_DEVICES)
    return device_type, [module.get_rng_state(at).numpy().tobytes() for at in range(count)]


def restore_random_states(device_type: str, states: list[bytes]) -> None:
    """Put back what `random_states` has returned. Raises RuntimeError if the device refuses it."""
    torch: Any = sys.modules["torch"]
    module = getattr(torch, device_type)
    for at, state in enumerate(states[: module.device_count()]):
        if state:
            module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), at)
