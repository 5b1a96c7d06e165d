"""Results of small collectives, kept so that a replay can answer the calls that it makes.

A replacement runs the script from the top; its peers have long gone on and cannot take part in, say, the broadcast of a
seed at start-up. So each rank keeps what its small collectives gave: those of calls that happen seldom (set-up, epoch
starts) in the recorder's log, those of the newest steps in the record of each boundary. A result is found again by the
place in the script from which the call was made, and by the step in which it was made.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from ttprun.rank.weights.tensor_bytes import bytes_of

if TYPE_CHECKING:
    from ttprun.rank.comm.journal import Entry
    from ttprun.rank.records.recorder import Recorder

# A place that has been called in so many different steps is part of the step, and lives in the records alone.
SELDOM = 16
ORIGIN = -1  # the "step" of what the set-up has drawn from outside (origins.py), which is kept in the same log
Result = tuple[int, str, list[bytes]]  # step (boundary that it follows), place, bytes of each output


class Results:
    """What this rank's small collectives have given, newest steps only; older ones are in the recorder's log."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._newest: list[Result] = []  # of this step
        self._visits: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (-1, 0))  # last step, steps
        self.step = 0

    def keep(self, entry: Entry) -> None:
        """Keep the outputs of a completed operation, which are small."""
        if any(tensor.layout is not torch.strided for tensor in entry.outputs):
            return
        outputs = [bytes_of(tensor).tobytes() for tensor in entry.outputs]
        with self._lock:
            result = (self.step, entry.place, outputs)
            self._newest.append(result)
            last, steps = self._visits[entry.place]
            if last != self.step:
                steps += 1
                self._visits[entry.place] = (self.step, steps)
            if steps <= SELDOM:
                self._recorder.append_log(msgpack.packb(result))

    def begin_step(self, step: int) -> list[Result]:
        """A boundary has been reached; returns the results of the step that it ends."""
        with self._lock:
            ended, self._newest = self._newest, []
            self.step = step
        return ended


def keep_origin(recorder: Recorder, drawn: tuple[str, Any]) -> None:
    """Keep what the set-up has drawn from outside."""
    recorder.append_log(msgpack.packb((ORIGIN, *drawn)))


def origins_in(log: Iterable[bytes]) -> list[tuple[str, Any]]:
    """What was kept so, oldest first."""
    found = map(msgpack.unpackb, log)
    return [(place, value) for step, place, value in found if step == ORIGIN]


class Answers:
    """What a replay answers to its collectives, from a lost rank's recorder."""

    def __init__(self, log: Iterable[bytes], recent: Iterable[Result]) -> None:
        self._by_place: defaultdict[str, dict[int, deque[list[bytes]]]] = defaultdict(dict)
        seen = set()
        for step, place, outputs in recent:
            seen.add((step, place))
            self._by_place[place].setdefault(step, deque()).append(outputs)
        for packed in log:
            step, place, outputs = msgpack.unpackb(packed)
            if step != ORIGIN and (step, place) not in seen:
                self._by_place[place].setdefault(step, deque()).append(outputs)

    def answer(self, place: str, outputs: list[torch.Tensor], newest_step: int) -> bool:
        """Fill `outputs` as the call from `place` last did in a step up to `newest_step`; False if that is unknown."""
        steps = [step for step, left in self._by_place[place].items() if step <= newest_step and left]
        if not steps:
            return False
        kept = self._by_place[place][max(steps)].popleft()
        if [len(raw) for raw in kept] != [tensor.nbytes for tensor in outputs]:
            return False
        for tensor, raw in zip(outputs, kept, strict=True):
            if raw:
                tensor.detach().copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape))
        return True


def as_result(packed: list[Any]) -> Result:
    """A result as it comes out of a record."""
    return (packed[0], packed[1], packed[2])


def as_if_alone(entry: Entry) -> None:
    """Fill a collective's outputs as if all ranks had given what this one gives."""
    op, args = entry.op, entry.args
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
