"""Works of NCCL's and HCCL's kind, whose `wait` returns before they are completed: ours wait, and fail late."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ttprun.device.interface import DeviceFailedError
from ttprun.groups import device_link, links
from ttprun.groups.connection import Exchange, GroupMember
from ttprun.groups.device_link import ABORTED, LateLink, LateWork


class Operation:
    """A work of such a backend; `complete` and `fail` are what its device does later."""

    def __init__(self) -> None:
        self.is_over = False
        self.error: Exception | None = None
        self.waits = 0

    def complete(self) -> None:
        self.is_over = True

    def fail(self, error: str) -> None:
        self.error = RuntimeError(error)
        self.is_over = True

    def wait(self) -> bool:
        self.waits += 1
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.is_over


class Backend:
    """Its abort ends operations as if they were completed, as NCCL's kernels are."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def abort(self) -> None:
        self.operation.complete()


def member(**further: Any) -> GroupMember:
    """The only member of its group, which nobody has to be told."""
    exchange: Any = Exchange(SimpleNamespace(send=lambda message: None))  # type: ignore[arg-type]
    return GroupMember(exchange, 0, "key", "world", 0, 1, [0], timedelta(seconds=5), **further)


def issued() -> tuple[Any, LateWork, Operation]:
    operation = Operation()
    link: Any = LateLink(member(), "cpu", lambda store, member: dist.ProcessGroup(0, 1))  # type: ignore[call-arg]
    link.backend = Backend(operation)
    return link, LateWork(link, operation), operation


def later(change: Any, *args: Any) -> None:
    threading.Timer(0.05, change, args).start()


def test_a_wait_lasts_until_the_device_has_completed_the_operation() -> None:
    _, work, operation = issued()
    later(operation.complete)

    work.wait()

    assert operation.is_completed()
    assert work.is_success()
    assert operation.waits  # the caller's stream is ordered after it


def test_a_wait_with_a_limit_ends_with_it() -> None:
    _, work, _ = issued()

    with pytest.raises(RuntimeError, match="has not completed"):
        work.wait(timedelta(seconds=0.01))

    assert not work.is_completed()


def test_an_operation_that_fails_late_raises_its_error_in_each_wait() -> None:
    _, work, operation = issued()
    later(operation.fail, "HCCS LINK ERROR")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="HCCS LINK ERROR"):
            work.wait()

    assert work.is_completed()
    assert not work.is_success()


def test_an_operation_that_an_abort_ends_has_failed_whatever_the_backend_says() -> None:
    link, work, operation = issued()

    link.abort()

    assert operation.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match=ABORTED):
        work.wait()


def test_the_groups_of_a_device_are_aborted_at_the_same_time() -> None:
    """NCCL's abort of one may wait for what another has still running on the device."""
    together = threading.Barrier(2)
    of_groups = []
    for _ in range(2):
        link, _, _ = issued()
        link.backend = SimpleNamespace(abort=lambda: together.wait(60.0))
        of_groups.append(SimpleNamespace(all=[link]))

    links.cut_all(of_groups)  # type: ignore[arg-type]

    assert not together.broken


def test_a_communicator_that_cannot_be_aborted_costs_its_process() -> None:
    def refuse() -> None:
        raise RuntimeError("ProcessGroup abort timed out")

    link, _, _ = issued()
    link.backend = SimpleNamespace(abort=refuse)
    group: Any = SimpleNamespace(all=[link])

    with pytest.raises(DeviceFailedError, match="cannot be aborted"):
        links.cut_all([group])


def test_an_operation_that_was_seen_completed_before_an_abort_has_succeeded() -> None:
    link, work, operation = issued()
    operation.complete()
    assert work.is_completed()

    link.abort()

    assert work.is_success()


def test_a_future_completes_when_the_device_does_and_not_before() -> None:
    _, work, operation = issued()
    completed = threading.Event()

    future = work.get_future()
    future.add_done_callback(lambda _: completed.set())

    assert not completed.wait(0.05)
    operation.complete()
    assert completed.wait(60.0)


def test_the_thread_that_completes_futures_holds_none_of_them_while_it_waits_for_more() -> None:
    _, work, operation = issued()
    operation.complete()
    is_free = threading.Event()
    weakref.finalize(work, is_free.set)

    device_link.watch(work, SimpleNamespace(set_result=lambda result: None))
    del work

    assert is_free.wait(60)


def test_a_future_of_an_operation_that_fails_late_has_its_error() -> None:
    _, work, operation = issued()
    later(operation.fail, "ncclRemoteError")

    with pytest.raises(RuntimeError, match="ncclRemoteError"):
        work.get_future().wait()


def test_the_backend_gets_the_options_that_the_script_has_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    plugin = SimpleNamespace(extended_api=True, creator_fn=lambda options, of_backend: given.append(of_backend))
    monkeypatch.setitem(dist.Backend._plugins, "HCCL", plugin)

    device_link._registered("hccl")(dist.HashStore(), member(options="a high priority"))

    assert given == ["a high priority"]


def test_a_communicator_of_a_stopped_device_is_aborted_once_that_is_restarted() -> None:
    orders: list[str] = []

    class OfStopped(Backend):
        is_stopped = True

        def abort_hccl_comm(self, reason: str) -> None:
            if self.is_stopped:
                raise RuntimeError("FORCE STOP, error code is 107022")
            orders.append(reason)

    link, work, _ = issued()
    link.backend, link.needs_stop = backend, _ = OfStopped(Operation()), True

    link.abort()
    link.drop()
    before = list(orders)
    backend.is_stopped = False
    issued()

    assert before == []
    assert orders == ["its generation is over"]
    with pytest.raises(RuntimeError, match=ABORTED):
        work.wait()
