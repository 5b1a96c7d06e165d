"""What a stream that waits for a word would mean for a repair, and what the host's waits cost: questions Q1 to Q9.

    python gate_ranks.py --ask "price of waits" --rank 0 --port 29600 --device cpu --backend gloo --folder /tmp/x

Asked and started as the questions of fact_ranks.py. On the CPU threads take the place of streams (lanes.py): what is
said there is only that the paths run. Begin with QUESTIONS.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import fact_ranks
from fact_ranks import Rank, abort, say, seconds
from lanes import lanes_for

ADDS = 20  # kernels behind a gate
SHORT_S = 5.0
LAYERS = 24
MIB = 1 << 20
_REPEATS = 200


class Attempt:
    """Something that is tried on a thread of its own, and may block.

    took_s  None as long as it has not come back
    """

    def __init__(self, act: Callable[[], Any], limit_s: float = SHORT_S) -> None:
        self.took_s: float | None = None
        self.error = ""
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()
        self.join(limit_s)

    def _run(self, act: Callable[[], Any]) -> None:
        began_s = time.perf_counter()
        try:
            act()
        except Exception as error:
            self.error = f"{type(error).__name__}: {str(error)[:200]}"
        self.took_s = time.perf_counter() - began_s

    def join(self, limit_s: float) -> None:
        """Give it more time."""
        self._thread.join(limit_s)

    def __str__(self) -> str:
        if self.took_s is None:
            return "blocks"
        return f"{self.took_s * 1e3:.1f} ms" + (f", with {self.error}" if self.error else "")


def say_attempt(what: str, attempt: Attempt) -> None:
    """A fact."""
    say(what, str(attempt), blocks=attempt.took_s is None, seconds=attempt.took_s, error=attempt.error)


def _wait_until(is_so: Callable[[], bool], limit_s: float) -> float | None:
    began_s = time.perf_counter()
    while not is_so():
        if time.perf_counter() - began_s > limit_s:
            return None
        time.sleep(0.0005)
    return time.perf_counter() - began_s


def abort_under_a_gate(rank: Rank) -> None:
    """Q1, Q2: abort() with a stuck collective and a gate behind it on the default stream; what else works meanwhile.

    The variant "a second one behind the gate" has another collective queued behind the closed gate.
    """
    second = fact_ranks.dist.new_group([0, 1]) if "second" in rank.variant else None
    if second:
        fact_ranks.dist.all_reduce(rank.tensor, group=second)
    (default, side), gate = lanes_for(rank.device, 2)
    work = rank.start_stuck()
    if rank.number == 0:
        if rank.device != "cpu":
            work.wait()  # orders the default stream behind it, and blocks nothing
        over = default.mark()
        gate.wait(default)
        for _ in range(ADDS):
            default.run(lambda: rank.tensor.add_(1))
        if second and rank.device != "cpu":
            fact_ranks.dist.all_reduce(rank.tensor, group=second, async_op=True)
        behind = default.mark()
        aborting = Attempt(lambda: [abort(rank.backend(group)) for group in (None, second) if group or group is None])
        say_attempt("abort() while the default stream is gated", aborting)
        ended_s = _wait_until(over.query, SHORT_S)
        text = "not within 5 s" if ended_s is None else f"{ended_s * 1e3:.1f} ms after the abort"
        say("the event behind the operation fires", text, fires=ended_s is not None)
        os.kill(rank.peer("warm"), signal.SIGCONT)
    else:
        aborting, behind = Attempt(lambda: abort(rank.backend())), None
    rank.meet("aborted")
    if rank.number == 0:
        _try_all(rank, side)
    group = Attempt(lambda: _meet_anew(rank, side), 20.0)
    if rank.number == 1 or behind is None:
        return
    say_attempt("a new group of both with its first all_reduce, while the stream is gated", group)
    say("what is behind the gate", "has not run" if not behind.query() else "HAS RUN", holds=not behind.query())
    opening = Attempt(gate.open)
    say_attempt("opening the gate", opening)
    aborting.join(SHORT_S)
    say_attempt("abort() after the gate has opened", aborting)
    ended_s = _wait_until(behind.query, SHORT_S)
    say("what is behind the gate then", "has run" if ended_s is not None else "does not run", runs=ended_s is not None)


def _meet_anew(rank: Rank, side: Any) -> None:
    group = fact_ranks.dist.new_group([0, 1])
    small = fact_ranks.torch.ones(4, device=rank.device)
    side.run(lambda: fact_ranks.dist.all_reduce(small, group=group))
    side.synchronize()


def _try_all(rank: Rank, side: Any) -> None:
    """Q2's list: each on a thread of its own and the side stream."""
    torch = fact_ranks.torch
    other, on_host = torch.ones(MIB, device=rank.device), torch.zeros(MIB)
    pinned = on_host.pin_memory() if rank.device == "cuda" else on_host
    acts: dict[str, Callable[[], Any]] = {
        "a kernel that is loaded": lambda: (side.run(lambda: other.add_(1)), side.synchronize()),
        "a copy to pinned memory": lambda: (
            side.run(lambda: pinned.copy_(other, non_blocking=True)), side.synchronize(),
        ),
        "item()": lambda: side.run(lambda: other[:1].item()),
        "memory from the driver": lambda: side.run(lambda: torch.empty(257 * MIB, device=rank.device)),
    }  # fmt: skip
    for what, act in acts.items():
        say_attempt(f"{what} while the default stream is gated", Attempt(act))


def first_launch(rank: Rank) -> None:
    """Q3: a kernel that was never launched before, launched behind a gate by the main thread; what others can do."""
    rank.warm_up()
    if rank.number == 1:
        return
    (default, side), gate = lanes_for(rank.device, 2)
    matrix = fact_ranks.torch.ones(64, 64, device=rank.device)
    default.synchronize()
    gate.wait(default)
    launch = Attempt(lambda: default.run(matrix.tril_))
    say_attempt("a first launch behind a gate", launch)
    _try_all(rank, side)
    gate.open()
    launch.join(SHORT_S)
    say_attempt("the first launch after the gate has opened", launch)


def memory_given_back(rank: Rank) -> None:
    """Q4: cudaFree of a real block while a stream is gated."""
    torch = fact_ranks.torch
    rank.warm_up()
    if rank.number == 1:
        return
    (default, side), gate = lanes_for(rank.device, 2)
    blocks = [torch.ones(64 * MIB // 4, device=rank.device)]
    default.synchronize()
    gate.wait(default)
    blocks.clear()
    freed = Attempt(torch.cuda.empty_cache if rank.device == "cuda" else side.synchronize)
    say_attempt("cudaFree of 64 MiB while the default stream is gated", freed)
    gate.open()
    freed.join(SHORT_S)
    say_attempt("cudaFree after the gate has opened", freed)


def opened_on_the_device(rank: Rank) -> None:
    """Q5: a gate that a copy on the device opens behind an operation, against a plain wait for its event."""
    rank.warm_up()
    if rank.number == 1:
        return
    (default, side), gate = lanes_for(rank.device, 2)
    for is_ok in (True, False):
        opened = 0
        for _ in range(_REPEATS // 10):
            gate.wait(default)
            behind = default.mark()
            side.sleep(1.0)
            if not is_ok:
                gate.refuse()
            gate.open_behind(side)
            side.synchronize()
            opened += _wait_until(behind.query, 0.02) is not None
            gate.open()
            default.synchronize()
        count = _REPEATS // 10
        say(f"a gate whose operation has {'succeeded' if is_ok else 'failed'} opens", f"{opened} of {count}", n=opened)
    by: dict[str, list[float]] = {"a gate": [], "an event": []}
    for _ in range(_REPEATS):
        for how, times in by.items():
            if how == "a gate":
                gate.wait(default)
            side.sleep(0.2)
            over = side.mark()
            if how == "a gate":
                gate.open_behind(side)
            else:
                default.wait_for(over)
            behind = default.mark()
            behind.synchronize()
            times.append(over.elapsed_time(behind) * 1e3)
    found = {how: statistics.median(times) for how, times in by.items()}
    text = ", ".join(f"behind {how} {us:.1f} µs" for how, us in found.items())
    say("from the end of an operation to the kernel that waits for it (median of 200)", text, **found)


class Layers:
    """A model in FSDP2's order on three lanes: compute, all-gathers, reduce-scatters; kernels that only take time.

    forward_ms, backward_ms, gather_ms, reduce_ms  of a layer
    """

    def __init__(self, kind: str, sizes: tuple[float, float, float, float]) -> None:
        (self.compute, self.gathers, self.reduces), self.gate = lanes_for(kind, 3)
        self._forward_ms, self._backward_ms, self._gather_ms, self._reduce_ms = sizes
        self.wait: Callable[[Any], None] = lambda mark: mark.synchronize()
        self.is_polled = self.at_issue = self.at_use = self.is_gated = False
        self._over: Any = None

    def _collective(self, lane: Any, ms: float, behind: Any) -> Any:
        if self.is_gated and self._over is not None:  # the issue rule: nothing is queued behind a closed gate
            self._host_waits(self._over)
        if behind is not None:
            lane.wait_for(behind)
        lane.sleep(ms)
        over = lane.mark()
        if self.at_issue:
            self._host_waits(over)
        return over

    def _host_waits(self, mark: Any) -> None:
        if self.is_polled:
            while not mark.query():
                time.sleep(0.0001)
        else:
            mark.synchronize()

    def _use(self, gathered: Any, ms: float) -> None:
        if self.at_use:
            self._host_waits(gathered)
        if self.is_gated and not gathered.query():
            self.gate.wait(self.compute)
            self.gate.open_behind(self.gathers)
            self._over = gathered
        self.compute.wait_for(gathered)
        self.compute.sleep(ms)

    def step(self) -> float:
        """Milliseconds of a step."""
        began_s = time.perf_counter()
        for _ in range(LAYERS):
            self._use(self._collective(self.gathers, self._gather_ms, None), self._forward_ms)
        reduced = []
        gathered = self._collective(self.gathers, self._gather_ms, None)
        for layer in range(LAYERS):
            current = gathered
            if layer + 1 < LAYERS:  # FSDP2 prefetches in the backward pass
                gathered = self._collective(self.gathers, self._gather_ms, None)
            self._use(current, self._backward_ms)
            reduced.append(self._collective(self.reduces, self._reduce_ms, self.compute.mark()))
        for over in reduced:
            self._host_waits(over) if self.at_use else self.compute.wait_for(over)
        self.compute.synchronize()
        return (time.perf_counter() - began_s) * 1e3


def price_of_waits(rank: Rank) -> None:
    """Q6: a step in FSDP2's order under each way to wait. One process: no time slices."""
    if rank.number == 1:
        return
    sizes = {"7B": (4.1, 8.3, 1.0, 2.0), "GPT-2 small": (0.4, 0.8, 0.15, 0.25)}
    ways = {
        "torch": {},
        "the host waits at the issue, by polls": {"at_issue": True, "is_polled": True},
        "the host waits at the issue, by events": {"at_issue": True},
        "D: at the use, reduce-scatters once": {"at_use": True},
        "V: gates and the issue rule": {"is_gated": True},
    }
    for model, four in sizes.items():
        if rank.device != "cuda":
            four = tuple(ms / 10 for ms in four)
        plain_ms = 0.0
        for way, switches in ways.items():
            layers = Layers(rank.device, four)  # type: ignore[arg-type]
            for name, value in switches.items():
                setattr(layers, name, value)
            layers.step()
            took_ms = statistics.median(layers.step() for _ in range(5))
            plain_ms = plain_ms or took_ms
            text = f"{took_ms:.1f} ms, {took_ms / plain_ms:.3f} of torch's"
            say(f"a step of {LAYERS} layers, {model}, {way}", text, ms=took_ms, ratio=took_ms / plain_ms)


def small_collective(rank: Rank) -> None:
    """Q7: 16 bytes, two ranks, nothing else: what two ranks on one card cost each other."""
    rank.warm_up()
    small = fact_ranks.torch.ones(4, device=rank.device)
    times = []
    for _ in range(_REPEATS):
        times.append(seconds(lambda: (fact_ranks.dist.all_reduce(small), rank.synchronize())))
    if rank.number == 0:
        median_ms = statistics.median(times) * 1e3
        say("an all_reduce of 16 bytes, nothing else runs", f"{median_ms:.3f} ms (median of {_REPEATS})", ms=median_ms)


def host_mirror(rank: Rank) -> None:
    """Q8: shared memory registered in pieces; copies into it, against pinned memory, alone and beside a product."""
    if rank.number == 1:
        return
    torch = fact_ranks.torch
    is_gpu = rank.device == "cuda"
    piece, count = (256 * MIB, 16) if is_gpu else (4 * MIB, 4)
    name = f"/dev/shm/gpu-check-{os.getpid()}"
    with open(name, "w+b") as file:
        os.unlink(name)  # nothing is left, whatever becomes of us
        file.truncate(piece * count)
        mapped = mmap.mmap(file.fileno(), piece * count)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    pieces = [whole[at * piece : (at + 1) * piece] for at in range(count)]
    (side,) = lanes_for(rank.device, 2)[0][1:]
    if is_gpu:
        register = torch.cuda.cudart().cudaHostRegister
        took_s = seconds(lambda: [register(part.data_ptr(), piece, 0) for part in pieces])
    else:
        took_s = seconds(lambda: [part.fill_(0) for part in pieces])
    gib = piece * count / (1 << 30)
    say(f"{gib:.2f} GiB of shared memory registered in pieces", f"{gib / took_s:.1f} GiB/s", seconds=took_s)
    source = torch.ones(piece, dtype=torch.uint8, device=rank.device)
    pinned = torch.empty(piece, dtype=torch.uint8, pin_memory=is_gpu)

    def copy_to(targets: list[Any]) -> float:
        def copy() -> None:
            for target in targets:
                side.run(lambda to=target: to.copy_(source, non_blocking=True))
            side.synchronize()

        copy()
        return gib / seconds(copy)

    say("copies into it", f"{copy_to(pieces):.1f} GiB/s")
    say("copies into pinned memory", f"{copy_to([pinned] * count):.1f} GiB/s")
    size = 8192 if is_gpu else 256
    matrix = torch.ones(size, size, device=rank.device, dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)
        rank.synchronize()

    multiply()
    alone_s = seconds(multiply)
    for target in pieces:
        side.run(lambda to=target: to.copy_(source, non_blocking=True))
    beside_s = seconds(multiply)
    side.synchronize()
    say("matrix products beside the copies", f"{beside_s / alone_s:.3f} of alone", ratio=beside_s / alone_s)
    if is_gpu:
        for part in pieces:
            torch.cuda.cudart().cudaHostUnregister(part.data_ptr())


def damage(rank: Rank) -> None:
    """Q9: a large all_reduce in place, its peer stopped in the middle, then an abort: how much of it is changed."""
    torch, dist = fact_ranks.torch, fact_ranks.dist
    elements = 64 * MIB if rank.device == "cuda" else 4 * MIB
    large = torch.ones(elements, device=rank.device)
    dist.all_reduce(large)
    rank.warm_up()
    large.fill_(1.0)
    rank.synchronize()
    rank.meet("filled")
    if rank.number == 1:
        # Rank 0 is in the collective when we are stopped from without, a moment after we have begun it.
        rank.store.set("begun", "1")
        dist.all_reduce(large)
        rank.synchronize()
        time.sleep(60)
    rank.store.wait(["begun"])
    work = dist.all_reduce(large, async_op=True)
    time.sleep(0.002)
    os.kill(rank.peer("filled"), signal.SIGSTOP)
    time.sleep(0.5)
    is_over = work.is_completed()
    aborted = Attempt(lambda: abort(rank.backend()))
    say_attempt("abort() with a large operation under way", aborted)
    rank.synchronize()
    changed = int((large != 1.0).sum())
    text = f"{changed} of {elements} elements changed" + ("; it was complete" if is_over else "")
    say("what an aborted all_reduce has left", text, changed=changed, elements=elements, is_complete=is_over)


QUESTIONS: dict[str, Callable[[Rank], None]] = {
    "abort under a gate": abort_under_a_gate,
    "first launch behind a gate": first_launch,
    "memory given back": memory_given_back,
    "opened on the device": opened_on_the_device,
    "price of waits": price_of_waits,
    "small collective": small_collective,
    "mirror in shared memory": host_mirror,
    "damage by an abort": damage,
}


if __name__ == "__main__":
    fact_ranks.QUESTIONS.clear()
    fact_ranks.QUESTIONS.update(QUESTIONS)
    fact_ranks.main()
