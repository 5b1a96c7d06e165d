"""What torch and NCCL really do when a peer is stopped or killed: one question, as one of two ranks. No ttprun in it.

    python fact_ranks.py --ask abort --rank 0 --port 29600 --device cuda --backend nccl --folder /tmp/x

Rank 0 prints one line of JSON a fact: {"what": ..., "found": ..., "values": {...}}. Both ranks may use one GPU: NCCL is
told that they are on two machines, and connects them by sockets. `facts.py` starts both and ends them. Begin with
QUESTIONS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

torch: Any = None  # imported when the environment is as the question wants it
dist: Any = None
ELEMENTS = 1 << 20
BLOCKED_S = 4.0
GIVE_UP_S = 12.0


def say(what: str, text: str, **values: Any) -> None:
    """A fact."""
    print("FACT " + json.dumps({"what": what, "found": text, "values": values}), flush=True)


class Rank:
    """One of two ranks that are connected.

    tensor  of ELEMENTS on the device
    """

    def __init__(self, options: argparse.Namespace) -> None:
        global torch, dist
        import torch
        import torch.distributed as dist

        self.number, self.device, self.folder = options.rank, options.device, Path(options.folder)
        self.variant = options.variant
        if self.device == "cuda":
            torch.cuda.set_device(0 if options.share else self.number)
        elif self.device != "cpu":
            torch.get_device_module(self.device).set_device(0)
        dist.init_process_group(options.backend, timeout=timedelta(seconds=300))
        self.store = dist.distributed_c10d._get_default_store()
        self.tensor = torch.ones(ELEMENTS, device=self.device)

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()

    def backend(self, group: Any = None) -> Any:
        return (group or dist.group.WORLD)._get_backend(torch.device(self.device))

    def meet(self, where: str) -> None:
        """Wait for the other rank, without a collective."""
        self.store.set(f"{where} {self.number}", str(os.getpid()))
        self.store.wait([f"{where} {1 - self.number}"], timedelta(seconds=60))

    def peer(self, where: str) -> int:
        """Pid of the other rank, after `meet`."""
        return int(self.store.get(f"{where} {1 - self.number}"))

    def warm_up(self) -> None:
        """One collective, and each kernel that is used later: CUDA loads a kernel when it is first launched."""
        dist.all_reduce(self.tensor)
        self.tensor.fill_(7.0)
        _ = self.tensor * 2
        _ = self.tensor[:2].tolist()
        self.synchronize()
        self.meet("warm")

    def break_peer(self, number: signal.Signals) -> None:
        """Rank 1 sends itself a signal; rank 0 comes back when that has happened."""
        if self.number == 1:
            os.kill(os.getpid(), number)
            return
        ends_s = time.monotonic() + 10
        stat = Path(f"/proc/{self.peer('warm')}/stat")
        while time.monotonic() < ends_s:
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
                    time.sleep(0.01)
                    continue
            return

    def start_stuck(self) -> Any:
        """Rank 1 stops; rank 0 has an all_reduce that nobody completes, and a kernel behind it on its stream."""
        self.warm_up()
        self.break_peer(signal.SIGSTOP)
        if self.number == 0:
            self.tensor.fill_(7.0)
            return dist.all_reduce(self.tensor, async_op=True)
        return None


def abort(backend: Any) -> None:
    (getattr(backend, "abort", None) or backend._abort)()


def seconds(act: Callable[[], Any]) -> float:
    began_s = time.monotonic()
    act()
    return time.monotonic() - began_s


def options_of(name: str) -> Any:
    options = getattr(dist, name)()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def returns(rank: Rank) -> None:
    """What synchronous operations return, and how long the first one takes."""
    backend = rank.backend()
    got: list[Any] = []
    took_s = seconds(
        lambda: (got.append(backend.allreduce([rank.tensor], options_of("AllreduceOptions"))), rank.synchronize())
    )
    if rank.number == 0:
        name = type(got[0]).__name__
        say("a synchronous allreduce of the backend returns", name, returns=name)
        say("the first collective, with the communicator", f"{took_s:.2f} s", seconds=took_s)
    got = [backend.barrier(options_of("BarrierOptions")), dist.barrier(), dist.all_reduce(rank.tensor)]
    names = [type(value).__name__ for value in got]
    if rank.number == 0:
        say("barrier of the backend, dist.barrier, dist.all_reduce return", ", ".join(names), returns=names)
    small = torch.ones(4, device=rank.device)
    times = sorted(seconds(lambda: (dist.all_reduce(small), rank.synchronize())) for _ in range(9))
    if rank.number == 0:
        say("an all_reduce of 16 bytes", f"{times[4] * 1e3:.2f} ms (median of 9)", seconds=times[4])
    with contextlib.suppress(RuntimeError):  # a backend that cannot coalesce
        with dist._coalescing_manager(async_ops=False) as manager:
            dist.all_reduce(small)
            dist.all_reduce(small)
        works = getattr(manager, "works", None)
        if rank.number == 0:
            say("works of a synchronous coalesced batch", str([type(work).__name__ for work in works or ()]))


def stuck_abort(rank: Rank) -> None:
    """abort() with a stuck kernel; what is queued behind it; destruction; a new group with the same peer."""
    work = rank.start_stuck()
    if rank.number == 0:
        work.wait()
        behind = rank.tensor * 2
        took_s = seconds(lambda: abort(rank.backend()))
        say("abort() with a stuck kernel", f"{took_s:.2f} s", seconds=took_s)
        took_s = seconds(rank.synchronize)
        seen = [rank.tensor[:2].tolist(), behind[:2].tolist()]
        text = f"{took_s:.2f} s; the tensor (7.0 before) has {seen[0]}, what was queued behind it (times 2) {seen[1]}"
        say("synchronize() after it", text, seconds=took_s, content=seen)
        os.kill(rank.peer("warm"), signal.SIGCONT)
    else:
        abort(rank.backend())
    rank.meet("again")
    took_s = seconds(
        lambda: (dist.all_reduce(torch.ones(4, device=rank.device), group=dist.new_group([0, 1])), rank.synchronize())
    )
    if rank.number == 0:
        say("a new group of both after it, with its first all_reduce", f"{took_s:.2f} s", seconds=took_s)
        del work
        took_s = seconds(dist.destroy_process_group)
        say("destroy_process_group() after it", f"{took_s:.2f} s", seconds=took_s)


def first_launch(rank: Rank) -> None:
    """A kernel that was never launched before, launched while a collective is stuck: does an abort free it?"""
    matrix, stream = torch.ones(64, 64, device=rank.device), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        matrix.fill_(1.0)  # so that the kernel is all that is new
    rank.start_stuck()
    if rank.number == 1:
        return
    launched: list[float] = []
    began_s = time.monotonic()

    def launch() -> None:
        with torch.cuda.stream(stream):
            matrix.tril_()
        launched.append(time.monotonic() - began_s)

    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    thread.join(BLOCKED_S)
    how = f"it returned after {launched[0]:.3f} s" if launched else f"blocked for {BLOCKED_S:.0f} s"
    say("a first launch while a collective is stuck", how, blocks=not launched)
    took_s = seconds(lambda: abort(rank.backend()))
    thread.join(GIVE_UP_S)
    text = (
        f"the abort took {took_s:.2f} s; the launch came back after {launched[0]:.2f} s"
        if launched
        else "still blocked"
    )
    say("an abort from another thread then", text, seconds=took_s, frees=bool(launched))
    took_s = seconds(rank.synchronize)
    say("synchronize() after it", f"{took_s:.2f} s", seconds=took_s)


def dead_peer(rank: Rank) -> None:
    """A peer is killed: when does which error show, and how long do abort and destruction take?"""
    rank.warm_up()
    rank.break_peer(signal.SIGKILL)
    began_s = time.monotonic()
    try:
        work = dist.all_reduce(rank.tensor, async_op=True)
    except Exception as error:
        say("the next collective raises", f"{type(error).__name__}: {str(error)[:300]}")
        return
    is_completed = False
    while not is_completed and time.monotonic() - began_s < GIVE_UP_S:
        time.sleep(0.02)
        is_completed = work.is_completed()
    took_s = time.monotonic() - began_s
    say(
        "the error shows in is_completed()",
        f"after {took_s:.2f} s" if is_completed else "not within 12 s",
        seconds=took_s,
    )
    for name in ("exception", "get_future_result"):
        say(f"work.{name}()", _answer(work, name))
    say("backend.get_error()", _answer(rank.backend(), "get_error"))
    took_s = seconds(lambda: abort(rank.backend()))
    say("abort()", f"{took_s:.2f} s", seconds=took_s)
    took_s = seconds(rank.synchronize)
    say("synchronize() after it", f"{took_s:.2f} s", seconds=took_s)
    del work
    took_s = seconds(dist.destroy_process_group)
    say("destruction of the backend", f"{took_s:.2f} s", seconds=took_s)


def _answer(of: Any, name: str) -> str:
    try:
        answer = getattr(of, name)()
        return str(answer.value() if name == "get_future_result" and answer.done() else answer)[:300]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def threads(rank: Rank) -> None:
    """Does a third Python thread run on while one polls is_completed() and one synchronizes on a stuck operation?"""
    work = rank.start_stuck()
    if rank.number == 1:
        return
    ticks: list[float] = []
    polls: list[bool] = []
    ends_s = time.monotonic() + 3

    def tick() -> None:
        while time.monotonic() < ends_s:
            ticks.append(time.monotonic())
            time.sleep(0.01)

    def poll() -> None:
        while time.monotonic() < ends_s:
            polls.append(work.is_completed())
            time.sleep(0.001)

    for act in (rank.synchronize, poll, tick):
        threading.Thread(target=act, daemon=True).start()
    time.sleep(max(0.0, ends_s - time.monotonic()) + 0.5)
    gap_s = max((after - before for before, after in pairwise(ticks)), default=0.0)
    text = f"{len(ticks)} ticks of 300, {len(polls)} polls in 3 s; the largest gap {gap_s:.2f} s"
    say("a third thread while one polls and one synchronizes", text, ticks=len(ticks), polls=len(polls), gap_s=gap_s)


def two_aborts(rank: Rank) -> None:
    """Two groups stuck: aborted one after the other, or together."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.all_reduce(rank.tensor, group=group)
    rank.warm_up()
    rank.break_peer(signal.SIGSTOP)
    if rank.number == 1:
        return
    for group in groups:
        dist.all_reduce(rank.tensor, group=group, async_op=True)
    workers = [threading.Thread(target=abort, args=(rank.backend(group),), daemon=True) for group in groups]
    began_s = time.monotonic()
    for worker in workers:
        worker.start()
        if rank.variant == "one after the other":
            worker.join(GIVE_UP_S)
    for worker in workers:
        worker.join(GIVE_UP_S)
    took_s = time.monotonic() - began_s
    done = sum(not worker.is_alive() for worker in workers)
    say(f"two aborts, {rank.variant}", f"{done} of 2 done after {took_s:.2f} s", seconds=took_s, done=done)
    if done == 2:
        took_s = seconds(rank.synchronize)
        say("synchronize() after them", f"{took_s:.2f} s", seconds=took_s)


def never_came(rank: Rank) -> None:
    """The peer dies before its first collective, and we are in ours: what frees the thread?"""
    rank.meet("warm")
    rank.break_peer(signal.SIGKILL)
    state: list[str] = []

    def reduce() -> None:
        try:
            dist.all_reduce(rank.tensor, async_op=True)
            state.append("it returned")
        except BaseException as error:
            state.append(f"{type(error).__name__}: {str(error)[:200]}")

    blocked = threading.Thread(target=reduce, daemon=True)
    blocked.start()
    blocked.join(BLOCKED_S)
    if state:
        say("the first collective with a dead peer", state[0], frees=True)
        return
    say("the first collective with a dead peer", f"blocked for {BLOCKED_S:.0f} s", blocks=True)
    cures = {
        "abort": lambda: abort(rank.backend()),
        "shutdown": lambda: rank.backend().shutdown(),
        "sockets": _close_sockets,
    }
    cure = threading.Thread(target=cures[rank.variant], daemon=True)
    took_s = seconds(lambda: (cure.start(), cure.join(GIVE_UP_S)))
    blocked.join(BLOCKED_S)
    returned = "did not return" if cure.is_alive() else f"returned after {took_s:.2f} s"
    freed = f"freed: {state[0]}" if state else "still blocked"
    say(f"{rank.variant} then", f"{returned}; the thread is {freed}", frees=bool(state), seconds=took_s)


def _close_sockets() -> None:
    """Shut down all TCP sockets of this process but the store's."""
    store = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and store not in _ports(copy):
                    copy.shutdown(socket.SHUT_RDWR)


def _ports(of: socket.socket) -> set[int]:
    ports = {of.getsockname()[1]}
    with contextlib.suppress(OSError):
        ports.add(of.getpeername()[1])
    return ports


QUESTIONS: dict[str, Callable[[Rank], None]] = {
    "returns": returns,
    "abort": stuck_abort,
    "first launch": first_launch,
    "dead peer": dead_peer,
    "threads": threads,
    "two aborts": two_aborts,
    "never came": never_came,
}


def main() -> None:
    """Be one rank of a question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", required=True, choices=list(QUESTIONS))
    parser.add_argument("--variant", default="")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--share", action="store_true")
    options = parser.parse_args()
    os.environ.update(RANK=str(options.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=options.port)
    if options.share:
        os.environ.update(NCCL_HOSTID=str(options.rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    rank = Rank(options)
    QUESTIONS[options.ask](rank)
    if options.rank == 1:
        time.sleep(60)  # rank 0 may still need us; we are ended with it
    os._exit(0)  # a stuck operation is not waited for


if __name__ == "__main__":
    main()
