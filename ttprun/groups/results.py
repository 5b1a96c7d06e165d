"""Results of small collectives, kept so that a replay can answer its calls.

A replacement runs the script from the top; the other ranks are far ahead and cannot take part in, say, the broadcast of
a seed at startup. So each rank keeps the results of its small collectives: of rare calls (setup, epoch starts) in the
recorder's log, of the newest steps in each boundary's record. A result is found by the call's place in the script and
by its step. Entries of the log with a negative step are of others.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgpack
import torch

from ttprun.device import accelerator
from ttprun.groups.operations import SAME_FOR_ALL
from ttprun.introspect import host_copies
from ttprun.introspect.tensor_bytes import bytes_of

if TYPE_CHECKING:
    from ttprun.groups.operations import Entry

# A place called in more steps than this belongs to the step itself, and is kept in the records alone.
SELDOM = 16
ISSUED, ENDED = "issued: ", "ended: "  # before the place of a thread's own operation: it was issued; so has the thread
_LET_END_S = 0.1
_SHARE = 2  # threads' own operations, which may be many, get that part of the log
Result = tuple[int, str, list[bytes]]  # step (boundary that it follows), place, bytes of each output


def place_of(op: str, outputs: list[torch.Tensor], where: str) -> str:
    """The key of a call's result: several operations may be called in one line of the script.

    DDP's forward broadcasts buffers, and once the buckets' sizes, which may have as many bytes; SyncBatchNorm gathers.

    where   the line, as `location_key` names it
    """
    kinds = f"{outputs[0].dtype}{[*outputs[0].shape]}x{len(outputs)}" if outputs else ""
    return f"{op} {kinds} {where}"


class Log(Protocol):
    """Where results are kept; in a rank its Recorder."""

    def append_log(self, entry: bytes, share: int = 1) -> bool: ...


class Results:
    """Results of this rank's small collectives in the current step."""

    def __init__(self, recorder: Log) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        # Of this step; the last two: when those on a device are there, and whether they are for the log.
        self._newest: list[tuple[int, str, list[bytes] | list[torch.Tensor], Any, bool]] = []
        self._visits: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (-1, 0))  # last step, steps
        # Threads that have issued operations of their own, with the places of these; those that go on: see `let_end`.
        self.threads: dict[threading.Thread, set[str]] = {}
        self._returned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.has_begun_threads = False  # in this step
        self.gate = threading.Lock()
        self.step = 0

    def keep(self, entry: Entry) -> None:
        """Keep the outputs of a completed operation, which are small."""
        if any(tensor.layout is not torch.strided for tensor in entry.outputs):
            return
        with self._lock:
            step, steps = self.step, 0
            if not entry.is_apart:  # places of threads are many, and each has few
                last, steps = self._visits[entry.place]
                if last != step:
                    steps += 1
                    self._visits[entry.place] = (step, steps)
        outputs: list[bytes] | list[torch.Tensor]
        if any(not tensor.is_cpu for tensor in entry.outputs):
            with accelerator.on(entry.stream):  # that may write to it next
                outputs = [tensor.detach().clone() for tensor in entry.outputs]
                ready = accelerator.mark()
        else:
            outputs, ready = [bytes_of(tensor).tobytes() for tensor in entry.outputs], None
        if entry.op in SAME_FOR_ALL:
            entry.result, entry.ready = outputs, ready or entry.ready  # a recovery may send it, from another stream
        with self._lock:
            self._newest.append((step, entry.place, outputs, ready, steps <= SELDOM))
            if steps <= SELDOM and all(isinstance(output, bytes) for output in outputs):
                self._recorder.append_log(msgpack.packb((step, entry.place, outputs)), _SHARE if entry.is_apart else 1)

    def note_issued(self, entry: Entry, inputs: list[torch.Tensor]) -> None:
        """A thread's own operation is about to be issued; its inputs are kept, as a replay may come to others."""
        given = [bytes_of(tensor).tobytes() for tensor in inputs]
        with self._lock:
            self.threads.setdefault(threading.current_thread(), set()).add(entry.place)
            self._recorder.append_log(msgpack.packb((self.step, ISSUED + entry.place, given)), _SHARE)

    def note_return(self) -> None:
        """An operation of this thread's own has completed: it goes on, but not while a record is made."""
        with self.gate:
            self._returned.add(threading.current_thread())

    def let_end(self) -> None:
        """A record is about to be made: threads whose operation has completed may first do what they do with it.

        Blocks for _LET_END_S at most for each. The caller holds `gate`.
        """
        for thread in list(self.threads):
            if thread in self._returned:
                thread.join(_LET_END_S)

    def begin_step(self, step: int) -> list[Result]:
        """Called at a boundary, before its record is made; returns the results of the step that it ends.

        Those on a device are there, as bytes, after the next `host_copies.take`.
        """
        results: list[Result] = []
        with self._lock:
            if self.threads:
                for thread in [thread for thread in self.threads if not thread.is_alive()]:
                    results += [(self.step, ENDED + place, []) for place in self.threads.pop(thread)]
            ended, self._newest = self._newest, []
            self.step, self.has_begun_threads = step, False
        for at, place, outputs, ready, is_logged in ended:
            result: Result = (at, place, [output for output in outputs if isinstance(output, bytes)])
            results.append(result)
            if tensors := [output for output in outputs if not isinstance(output, bytes)]:
                host_copies.later(tensors, partial(self._add, result, is_logged), ready)
        return results

    def _add(self, result: Result, is_logged: bool, copies: list[torch.Tensor]) -> None:
        result[2].extend(bytes_of(copy).tobytes() for copy in copies)
        if is_logged:
            self._recorder.append_log(msgpack.packb(result))


class Answers:
    """The results of the lost rank's small collectives, by which a replay answers its calls."""

    def __init__(self, log: Iterable[bytes], recent: Iterable[Result]) -> None:
        self._by_place: defaultdict[str, dict[int, deque[list[bytes]]]] = defaultdict(dict)
        seen = set()
        for step, place, outputs in recent:
            seen.add((step, place))
            self._by_place[place].setdefault(step, deque()).append(outputs)
        for packed in log:
            step, place, outputs = msgpack.unpackb(packed)
            if step >= 0 and (step, place) not in seen:
                self._by_place[place].setdefault(step, deque()).append(outputs)

    def has(self, place: str) -> bool:
        """Whether a result of a place is left."""
        return any(self._by_place[place].values())

    def answer(
        self, place: str, outputs: list[torch.Tensor], newest_step: float, is_oldest_first: bool = False
    ) -> bool:
        """Fill `outputs` with the newest result of a place that is left, or the oldest one.

        place         where in the script the collective is called
        outputs       the call's own, as many and of the same sizes in bytes as the result
        newest_step   later results are not used
        returns       False if there is none, or one of other sizes: then nothing is written
        """
        steps = [step for step, results in self._by_place[place].items() if step <= newest_step and results]
        if not steps:
            return False
        kept = self._by_place[place][(min if is_oldest_first else max)(steps)].popleft()
        if [len(raw) for raw in kept] != [tensor.nbytes for tensor in outputs]:
            return False
        self.fill(outputs, kept)
        return True

    @staticmethod
    @torch.no_grad()
    def fill(outputs: list[torch.Tensor], kept: list[bytes]) -> None:
        """Write what is kept of an operation's outputs, which have the same sizes in bytes."""
        for tensor, raw in zip(outputs, kept, strict=True):
            if raw:
                tensor.detach().copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape))


def as_if_alone(entry: Entry) -> None:
    """Fill a collective's outputs as if all ranks had this one's inputs."""
    op, args = entry.op, entry.args
    if op == "recv":  # zeros are valid indices, and no NaNs
        for output in entry.outputs:
            output.detach().zero_()
        return
    if not entry.outputs or args[0] is args[-1] or op in ("allreduce", "allreduce_coalesced", "broadcast", "reduce"):
        return
    with torch.no_grad():
        if op in ("allgather", "allgather_coalesced"):
            for outputs, given in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(given)
        elif op in ("_allgather_base", "all_gather_single"):
            for chunk in args[0].chunk(entry.group.size()):
                chunk.copy_(args[1].reshape(chunk.shape))
        elif op in ("_reduce_scatter_base", "reduce_scatter_single"):
            args[0].copy_(args[1].chunk(entry.group.size())[entry.group.rank()].reshape(args[0].shape))
        elif op == "reduce_scatter":
            for output, given in zip(args[0], args[1], strict=True):
                output.copy_(given[entry.group.rank()])
