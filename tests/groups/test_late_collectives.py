"""Collectives that return before they are done, as those of devices do, in real ranks: a failed one feeds no step.

The backend is gloo's, whose works are made late: `wait` returns at once, and the result is there some time after.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.rank.worlds import FakeAgent, run_world
from ttprun.groups.connection import Transport
from ttprun.groups.device_link import LateLink
from ttprun.groups.links import TRANSPORTS
from ttprun.protocol import from_rank

LATE_S = 0.05
BROKEN = "NCCL error: remote process exited\nncclRemoteError: A call failed possibly due to a network error"
STOPPED = "operator(): simulated NPU function error: HCCS LINK ERROR, error code is 507056"
_fails_at: list[int] = []  # numbers of this rank's all-reduces that fail
_fails_with = [BROKEN]


class Work:
    """It completes LATE_S after the operation that it carries out on copies; then the outputs are written."""

    def __init__(self, below: Any, outputs: list[torch.Tensor], copies: list[torch.Tensor], fails: bool) -> None:
        self._below, self._outputs, self._copies, self._fails = below, outputs, copies, fails
        self._is_over = threading.Event()
        self.error: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._below.wait()
            time.sleep(LATE_S)
            if self._fails:
                raise RuntimeError(_fails_with[0])
            for output, copy in zip(self._outputs, self._copies, strict=True):
                output.copy_(copy)
        except RuntimeError as error:
            self.error = error
            for output in self._outputs:
                output.fill_(float("nan"))
        self._is_over.set()

    def wait(self) -> bool:
        if self._is_over.is_set() and self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()


class Backend(dist.ProcessGroup):
    """All-reduces and broadcasts over gloo."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size)
        self._issued = 0

    def allreduce(self, tensors: Any, options: Any) -> Any:
        copies = [tensor.detach().clone() for tensor in tensors]
        self._issued += 1
        fails = self._issued in _fails_at
        if fails:
            _fails_at.remove(self._issued)
        return self._late(self._gloo.allreduce(copies, options), tensors, copies, fails)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        copies = [tensor.detach().clone() for tensor in tensors]
        return self._late(self._gloo.broadcast(copies, options), tensors, copies)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        copies = [[tensor.detach().clone() for tensor in one] for one in outputs]
        below = self._gloo.allgather(copies, [tensor.clone() for tensor in inputs], options)
        return self._late(below, [t for one in outputs for t in one], [t for one in copies for t in one])

    def _late(self, below: Any, outputs: Any, copies: Any, fails: bool = False) -> Work:
        return Work(below, [tensor.detach() for tensor in outputs], copies, fails)

    def abort(self) -> None:
        self._gloo.abort()


def begin(rank: int, place: str, fails_at: list[int]) -> None:
    _fails_at[:] = fails_at if rank == 0 or _fails_with[0] == STOPPED else []

    def make(slot: Any) -> LateLink:
        return LateLink(slot, "cpu", lambda store, slot: Backend(store, slot.rank, slot.size))

    TRANSPORTS["gloo"] = Transport("gloo", frozenset({"cpu"}), make, is_late=True)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def step_by_hand(rank: int, place: str, fails_at: list[int]) -> list[float]:
    begin(rank, place, fails_at)
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(3):
        weight.grad = torch.full((4,), float(step + rank))
        dist.all_reduce(weight.grad, async_op=True)  # never waited for: the step itself must wait
        optimizer.step()
    return weight.detach().tolist()


def step_with_ddp(rank: int, place: str, fails_at: list[int]) -> list[float]:
    begin(rank, place, fails_at)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 2, bias=False)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        wrapped(torch.full((1, 64), float(step + rank))).sum().backward()
        optimizer.step()
    return model.weight.detach().flatten().tolist()


def reconnect(agent: FakeAgent) -> None:
    """The rank whose link failed reports it, and all connect again."""
    agent.wait_for(0, from_rank.Broken)
    agent.break_connections()
    agent.resume()


def test_a_step_waits_for_a_collective_that_the_script_does_not_wait_for(tmp_path: Any) -> None:
    found = run_world(step_by_hand, str(tmp_path / "store"), [], is_begun=False)

    assert found == [[-9.0] * 4] * 2


def test_a_collective_that_fails_late_is_issued_again_before_the_step_is_taken(tmp_path: Any) -> None:
    found = run_world(step_by_hand, str(tmp_path / "store"), [2], scenario=reconnect, is_begun=False)

    assert found == [[-9.0] * 4] * 2


def test_a_late_failure_of_ddps_bucket_reaches_no_gradient(tmp_path: Any) -> None:
    expected = run_world(step_with_ddp, str(tmp_path / "undisturbed"), [], is_begun=False)

    found = run_world(step_with_ddp, str(tmp_path / "store"), [3], scenario=reconnect, is_begun=False)

    assert found == expected


def step_until_an_error(rank: int, place: str, fails_at: list[int]) -> str:
    _fails_with[0] = STOPPED
    try:
        step_with_ddp(rank, place, fails_at)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"


def test_an_error_that_stops_a_devices_queue_ends_the_scripts_run_since_work_is_lost_with_it(tmp_path: Any) -> None:
    found = run_world(step_until_an_error, str(tmp_path / "store"), [3], is_begun=False)

    assert ["HCCS LINK ERROR" in error for error in found] == [True, True]
