"""Does a stream of CUDA wait for a word of pinned host memory (cuStreamWaitValue32), and what runs meanwhile?

    python stream_wait.py

One line of JSON a fact, as fact_ranks.py has them. A gate on the stream in place of a blocked CPU would need it. Begin
with main().
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
BLOCKED_S = 2.0
REPEATS = 200


def say(what: str, text: str, **values: Any) -> None:
    """A fact."""
    print("FACT " + json.dumps({"what": what, "found": text, "values": values}), flush=True)


class Gate:
    """A word of pinned memory for which streams wait; its value only grows."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.name = next(
            name for name in ("cuStreamWaitValue32_v2", "cuStreamWaitValue32") if hasattr(self._cuda, name)
        )
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._address = ctypes.c_uint64()
        got = self._cuda.cuMemHostGetDevicePointer_v2(
            ctypes.byref(self._address), ctypes.c_void_p(self._word.data_ptr()), 0
        )
        if got:
            raise RuntimeError(f"cuMemHostGetDevicePointer: error {got}")
        self._plain = ctypes.c_int32.from_address(self._word.data_ptr())
        self.value = 0

    def wait(self, stream: torch.cuda.Stream) -> None:
        """What is put on the stream from now on waits for `open`."""
        self.value += 1
        call = getattr(self._cuda, self.name)
        got = call(
            ctypes.c_void_p(stream.cuda_stream), self._address, ctypes.c_uint32(self.value), ctypes.c_uint(AT_LEAST)
        )
        if got:
            raise RuntimeError(f"{self.name}: error {got}")

    def open(self) -> None:
        """Let go on what waits."""
        self._plain.value = self.value


def main() -> None:
    """Ask; the process ends whatever is still blocked."""
    tensor, other = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    tensor.add_(1)
    _ = tensor[:1].item()
    torch.cuda.synchronize()
    gate, stream, second = Gate(), torch.cuda.Stream(), torch.cuda.Stream()
    began_s = time.perf_counter()
    gate.wait(stream)
    call_us = (time.perf_counter() - began_s) * 1e6
    with torch.cuda.stream(stream):
        tensor.add_(1)
        behind = stream.record_event()
    time.sleep(0.5)
    waits = not behind.query()
    with torch.cuda.stream(second):
        other.add_(1)
        beside = second.record_event()
    time.sleep(0.1)
    say(gate.name, f"the stream {'waits' if waits else 'DOES NOT WAIT'}; the call took {call_us:.0f} µs", waits=waits)
    say("another stream meanwhile", "runs" if beside.query() else "does not run", runs=beside.query())
    pinned = torch.zeros(16).pin_memory()
    meanwhile: dict[str, Callable[[], Any]] = {
        "a copy to the host on another stream": lambda: other[:1].item(),
        "cudaMalloc": lambda: torch.cuda.caching_allocator_alloc(64 << 20),
        "cudaHostAlloc": lambda: torch.zeros(64 << 20, dtype=torch.uint8).pin_memory(),
        "an asynchronous copy from pinned memory": lambda: other[:16].copy_(pinned, non_blocking=True),
        "a first launch of a kernel": lambda: other[:4096].view(64, 64).tril_(),
        "cudaFree of cached blocks": torch.cuda.empty_cache,
    }
    for what, act in meanwhile.items():
        took_s = _try(act, second)
        text = f"blocked for {BLOCKED_S:.0f} s, until the gate opens" if took_s is None else f"{took_s * 1e3:.1f} ms"
        say(f"{what} while a stream waits", text, blocks=took_s is None)
        if took_s is None:  # the thread would stand in the way of the next
            gate.open()
            torch.cuda.synchronize()
            gate.wait(stream)
    gate.open()
    torch.cuda.synchronize()
    latencies = sorted(_latency(gate, stream, tensor) for _ in range(REPEATS))
    median_us, worst_us = statistics.median(latencies) * 1e6, latencies[int(0.99 * REPEATS)] * 1e6
    text = f"{median_us:.1f} µs (median of {REPEATS}), {worst_us:.1f} µs (99 %)"
    say("from opening it to the end of the kernel behind it", text, median_us=median_us, worst_us=worst_us)
    plain = sorted(_plain(stream, tensor) for _ in range(REPEATS))
    say("the same kernel without a gate, from its launch", f"{statistics.median(plain) * 1e6:.1f} µs")
    os._exit(0)


def _try(act: Callable[[], Any], stream: torch.cuda.Stream) -> float | None:
    """Seconds that something takes on a thread of its own; None if it does not come back in time."""
    took: list[float] = []

    def run() -> None:
        began_s = time.perf_counter()
        with torch.cuda.stream(stream):
            act()
        took.append(time.perf_counter() - began_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BLOCKED_S)
    return took[0] if took else None


def _latency(gate: Gate, stream: torch.cuda.Stream, tensor: torch.Tensor) -> float:
    gate.wait(stream)
    with torch.cuda.stream(stream):
        tensor.add_(1)
        behind = stream.record_event()
    time.sleep(0.001)
    began_s = time.perf_counter()
    gate.open()
    while not behind.query():
        pass
    return time.perf_counter() - began_s


def _plain(stream: torch.cuda.Stream, tensor: torch.Tensor) -> float:
    began_s = time.perf_counter()
    with torch.cuda.stream(stream):
        tensor.add_(1)
        behind = stream.record_event()
    while not behind.query():
        pass
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
