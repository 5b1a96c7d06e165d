"""Streams, marks and gates of a GPU; on the CPU a thread takes the place of each stream, so that all paths run there.

A gate is a word in memory for which a stream waits (cuStreamWaitValue32): what is put on the stream behind it does not
begin before the word is set. Begin with `lanes_for`.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class Mark:
    """A place on a lane of the CPU; as a torch.cuda.Event."""

    def __init__(self) -> None:
        self._reached, self._at_s = threading.Event(), 0.0

    def reach(self) -> None:
        self._at_s = time.perf_counter()
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def elapsed_time(self, later: Mark) -> float:
        """Milliseconds from here to there."""
        return (later._at_s - self._at_s) * 1e3


class CpuLane:
    """What is put on it runs in order, on a thread of its own."""

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._acts.get()()

    def run(self, act: Callable[[], Any]) -> None:
        """Put it on the lane."""
        self._acts.put(act)

    def mark(self) -> Mark:
        """A mark that is reached when all before it is over."""
        mark = Mark()
        self.run(mark.reach)
        return mark

    def wait_for(self, mark: Mark) -> None:
        """What comes next on the lane begins after the mark, which may be another lane's."""
        self.run(mark.synchronize)

    def sleep(self, ms: float) -> None:
        """A kernel that takes so long."""
        self.run(lambda: time.sleep(ms / 1e3))

    def synchronize(self) -> None:
        """Block until all that is on it is over."""
        self.mark().synchronize()


class CpuGate:
    """A word that lanes of the CPU wait for."""

    name = "a condition (no GPU)"

    def __init__(self) -> None:
        self._changed, self._value, self._asked = threading.Condition(), 0, 0
        self._refused: set[int] = set()

    def wait(self, lane: CpuLane) -> None:
        """What is put on the lane from now on waits until the gate opens."""
        self._asked += 1
        wanted = self._asked
        lane.run(lambda: self._pass(wanted))

    def _pass(self, wanted: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._value >= wanted)

    def open(self) -> None:
        """Let go on all that waits."""
        self._set(self._asked)

    def open_behind(self, lane: CpuLane) -> None:
        """It opens when the lane comes to this, unless `refuse` was called by then."""
        wanted = self._asked
        lane.run(lambda: None if wanted in self._refused else self._set(wanted))

    def refuse(self) -> None:
        """Whatever comes to open it finds that the operation has failed."""
        self._refused.add(self._asked)

    def _set(self, value: int) -> None:
        with self._changed:
            self._value = max(self._value, value)
            self._changed.notify_all()


class GpuLane:
    """A stream."""

    cycles_a_ms = 0.0

    def __init__(self, stream: Any) -> None:
        import torch

        self._cuda, self.stream = torch.cuda, stream
        if not GpuLane.cycles_a_ms:
            GpuLane.cycles_a_ms = self._measure()

    def _measure(self) -> float:
        self._cuda._sleep(1_000)
        begin, end = self.mark(), None
        self.run(lambda: self._cuda._sleep(20_000_000))
        end = self.mark()
        end.synchronize()
        return 20_000_000 / float(begin.elapsed_time(end))

    def run(self, act: Callable[[], Any]) -> None:
        """Launch it there."""
        with self._cuda.stream(self.stream):
            act()

    def mark(self) -> Any:
        """An event behind all that is there."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait_for(self, mark: Any) -> None:
        """As CpuLane.wait_for."""
        self.stream.wait_event(mark)

    def sleep(self, ms: float) -> None:
        """A kernel that takes so long."""
        self.run(lambda: self._cuda._sleep(int(ms * GpuLane.cycles_a_ms)))

    def synchronize(self) -> None:
        """Block until all that is on it is over."""
        self.stream.synchronize()


class GpuGate:
    """A word for which streams wait; its value only grows. It lies on the device, and is set by copies to it.

    Raises RuntimeError if the driver refuses.
    """

    def __init__(self) -> None:
        import torch

        self._torch, self._driver = torch, ctypes.CDLL("libcuda.so.1")
        names = ("cuStreamWaitValue32_v2", "cuStreamWaitValue32")
        self.name = next(name for name in names if hasattr(self._driver, name))
        self._word = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._values = torch.arange(1 << 16, dtype=torch.int32).pin_memory()
        self._opener = GpuLane(torch.cuda.Stream())
        self._asked = 0

    def wait(self, lane: GpuLane) -> None:
        """As CpuGate.wait."""
        self._asked += 1
        stream, address = ctypes.c_void_p(lane.stream.cuda_stream), ctypes.c_uint64(self._word.data_ptr())
        got = getattr(self._driver, self.name)(stream, address, ctypes.c_uint32(self._asked), ctypes.c_uint(_AT_LEAST))
        if got:
            raise RuntimeError(f"{self.name}: error {got}")

    def open(self) -> None:
        """Let go on all that waits."""
        self._values[self._asked] = self._asked
        self.open_behind(self._opener)

    def open_behind(self, lane: GpuLane) -> None:
        """As CpuGate.open_behind: a copy, which reads the word of pinned memory when it runs."""
        value = self._values[self._asked : self._asked + 1]
        lane.run(lambda: self._word.copy_(value, non_blocking=True))

    def refuse(self) -> None:
        """As CpuGate.refuse."""
        self._values[self._asked] = 0


def lanes_for(kind: str, count: int) -> tuple[list[Any], Any]:
    """Lanes and a gate. On a GPU the first lane is the default stream.

    kind     "cuda", or else threads
    returns  [count] lanes, a gate
    """
    if kind != "cuda":
        return [CpuLane() for _ in range(count)], CpuGate()
    import torch

    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(count - 1))]
    return [GpuLane(stream) for stream in streams], GpuGate()
