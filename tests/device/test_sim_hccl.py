"""The simulated NPU's part in a process group: what it lets through, and when."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from ttprun.device.sim import Queue, SimulatedNpu

LIMIT = timedelta(seconds=0.1)


class Operation:
    """Takes the place of gloo's work: under way until it is told to end."""

    def __init__(self) -> None:
        self.promise: torch.futures.Future[Any] = torch.futures.Future()
        self.has_failed = False
        self.waits = 0

    def wait(self, *limit: timedelta) -> bool:
        self.waits += 1
        if self.has_failed or not self.is_completed():
            raise RuntimeError("Connection closed by peer" if self.has_failed else "Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.promise.done()

    def is_success(self) -> bool:
        return self.is_completed() and not self.has_failed

    def get_future(self) -> torch.futures.Future[Any]:
        return self.promise


class Links:
    """Takes the place of gloo's connection."""

    def __init__(self) -> None:
        self.operation = Operation()

    def issue(self, op: str, args: Any) -> Operation:
        return self.operation


def issue(communicator: Any, tensor: torch.Tensor | None = None) -> tuple[Any, Operation]:
    links, given = Links(), torch.zeros(2) if tensor is None else tensor
    return communicator.issue(links, "allreduce", ([given], None), [given]), links.operation


def test_an_operation_goes_through_a_device_that_runs() -> None:
    device = SimulatedNpu()
    communicator = device.communicator()
    work, below = issue(communicator)
    before = work.is_completed(), work.is_success()
    below.promise.set_result("outputs")

    assert (before, work.is_completed(), work.is_success()) == ((False, False), True, True)
    assert work.wait(LIMIT)
    assert work.get_future().wait() == "outputs"
    assert communicator.calls == {"allreduce": 1}


def test_a_device_that_has_broken_refuses_operations_and_none_is_counted() -> None:
    device = SimulatedNpu()
    communicator = device.communicator()
    device.module.npu.queue = Queue.HCCS_LINK_EXIT

    with pytest.raises(RuntimeError, match="HCCS LINK ERROR"):
        issue(communicator)
    assert not communicator.calls


def test_a_tensor_whose_memory_has_failed_is_no_input() -> None:
    device = SimulatedNpu()
    weights = torch.zeros(2)
    device.module.npu.fail_memory(weights)
    device.restart()

    with pytest.raises(RuntimeError, match="unsafe data"):
        issue(device.communicator(), weights)
    device.mark_safe(weights)
    issue(device.communicator(), weights)


def test_an_operation_under_which_the_device_breaks_has_failed_for_good_and_ends_when_its_links_let_go() -> None:
    device = SimulatedNpu()
    work, below = issue(device.communicator())
    device.module.npu.queue = Queue.HCCS_LINK_EXIT
    with pytest.raises(RuntimeError, match="HCCS LINK ERROR"):
        work.wait(LIMIT)
    held = work.is_completed()
    device.restart()
    below.promise.set_result("outputs")

    assert (held, below.waits) == (False, 1)  # it was waited for, as long as the limit allowed
    assert (work.is_completed(), work.is_success()) == (True, False)
    with pytest.raises(RuntimeError, match="HCCS LINK ERROR"):
        work.wait()
    with pytest.raises(RuntimeError, match="HCCS LINK ERROR"):
        work.get_future().wait()


def test_links_that_break_under_a_device_that_runs_are_told_as_they_are() -> None:
    work, below = issue(SimulatedNpu().communicator())
    below.has_failed = True

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        work.wait(LIMIT)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_communicator_takes_nothing_after_a_stop_before_it_is_brought_back(is_in_place: bool) -> None:
    device = SimulatedNpu()
    communicator, other = device.communicator(), device.communicator()
    device.stop()
    device.restart()
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        issue(communicator)

    device.rebuild_communicators(communicator if is_in_place else None, rebuilds_links=is_in_place)

    issue(communicator)
    assert other.is_stopped is is_in_place
