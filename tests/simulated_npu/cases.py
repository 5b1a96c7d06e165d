"""What the simulated NPU does as a real one would; tests/device/test_simulated_npu.py runs it in its own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_npu import breaking, hccl
from torch_npu.breaking import State
from torch_npu.npu import _C

from ttprun.capture.records.evidence import REGION_BYTES, Evidence
from ttprun.device import accelerator
from ttprun.device.interface import DeviceFailedError
from ttprun.groups import generations
from ttprun.groups.operations import Entry
from ttprun.introspect import host_copies
from ttprun.introspect.current_rank import INPUT
from ttprun.introspect.tensor_bytes import bytes_of, content_of, folded, plain_together
from ttprun.tensors.mirror_slots import ReducedParts

TOO_LONG = 1200  # a product of matrices of this size runs for a while


@pytest.fixture(autouse=True)
def _whole_device() -> Iterator[None]:
    yield
    torch.npu.stop_device(0)
    torch.npu.check_uce_in_memory(0)
    torch.distributed.reinit_process_group(None, False)
    torch.npu.restart_device(0, disable_tensor_unsafe_check=True)


def busy() -> torch.Tensor:
    """Work that the device has begun, and not ended."""
    large = torch.ones(TOO_LONG, TOO_LONG, device="npu")
    return large @ large @ large


def test_results_of_reductions_are_kept_in_memory_that_the_device_knows_once_it_grows_no_more(tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.touch()
    parts, result = ReducedParts(str(path), lambda more: None), torch.ones(1000, device="npu")
    torch.npu.synchronize()
    for number in range(3):
        parts.keep(0, "group", number, result)
    assert torch.npu.registered() == 0

    for number in range(3):
        parts.keep(1, "group", number, result)
    assert torch.npu.registered() == (path.stat().st_size if _C.is_kind("nccl") else 0)
    parts.take(1, "group", 2, result.zero_())
    parts.release()

    assert result.sum().item() == 1000
    assert torch.npu.registered() == 0


def test_a_digest_of_a_large_tensor_takes_little_of_the_device() -> None:
    tensor = torch.ones(8 << 20, dtype=torch.int32, device="npu")
    folded(tensor[: 1 << 20])
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()

    folded(tensor)

    assert torch.npu.max_memory_allocated() - before <= 8 << 20


def test_what_was_held_at_once_and_given_back_is_not_taken_for_free() -> None:
    held = torch.empty(16 << 20, dtype=torch.uint8, device="npu")
    del held
    torch.npu.empty_cache()

    assert torch.npu.mem_get_info()[0] - accelerator.unclaimed_bytes() >= 16 << 20


def test_our_own_stream_waits_for_an_event_alone_and_what_it_was_given_is_done_when_it_is_finished() -> None:
    small, event = torch.ones(3, device="npu"), torch.npu.Event()
    torch.npu.synchronize()
    busy()
    event.record()
    target = torch.zeros(3)

    with accelerator.beside():
        target.copy_(small, non_blocking=True)
        accelerator.finish_here()
    assert target.sum() == 3
    assert not event.query()
    with accelerator.beside(event):
        accelerator.finish_here()
    assert event.query()


def test_small_tensors_are_copied_together_whatever_their_types() -> None:
    expected = [torch.arange(7), torch.randn(3, 5).half(), torch.tensor(1.5), torch.ones(9).bool()]
    tensors = [one.to("npu") for one in expected]
    _, count = torch.npu.copied_to_host()

    found = plain_together([torch.zeros(2), *tensors, torch.ones(0, device="npu")])

    assert torch.npu.copied_to_host()[1] == count + 1
    assert all(one.is_cpu and torch.equal(one, other) for one, other in zip(found[1:-1], expected, strict=True))
    assert [one.dtype for one in found[1:-1]] == [one.dtype for one in expected]


def test_what_is_left_for_a_boundary_is_copied_at_once_in_the_order_in_which_it_came() -> None:
    used: list[list[float]] = []
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        late = busy()[0, :2].clone()
        ready = torch.npu.Event()
        ready.record()
    _, count = torch.npu.copied_to_host()

    host_copies.later([late], lambda copies: used.append(copies[0].tolist()), ready)
    host_copies.later([], lambda copies: used.append([]))
    host_copies.later(
        [torch.full((1,), 7.0, device="npu"), torch.zeros(1)], lambda copies: used.append([*map(float, copies)])
    )
    (further,) = host_copies.take([torch.ones(3, device="npu").half()])

    assert used == [[TOO_LONG**2] * 2, [], [7.0, 0.0]]
    assert further.is_cpu
    assert torch.equal(further, torch.ones(3).half())
    assert torch.npu.copied_to_host()[1] == count + 1
    assert host_copies.waiting == []


def test_what_is_sent_ahead_is_not_waited_for_and_is_what_it_was_when_it_was_left() -> None:
    used: list[float] = []
    tensor = busy()[0, :1].clone()
    host_copies.later(
        [tensor.clone().view(torch.uint8)], lambda copies: used.append(copies[0].view(torch.float).item())
    )
    elsewhere = ([torch.zeros(1, device="npu:1"), torch.zeros(1)], used.append, None)
    host_copies.later(*elsewhere)
    drains = torch.npu.drains()

    sent = host_copies.send()
    tensor.zero_()

    assert sent is not None
    assert not sent.is_completed()
    assert (torch.npu.drains(), host_copies.send()) == (drains, None)
    assert host_copies.waiting == [elsewhere]
    host_copies.forget()
    torch.npu.synchronize()
    assert sent.is_completed()
    sent.set_result(None)
    assert used == [TOO_LONG**2]


def test_what_is_sent_ahead_on_a_device_that_fails_before_is_over_and_not_used() -> None:
    used: list[object] = []
    bad = torch.ones(4, device="npu")
    breaking.fail_memory(bad, State.UCE_EXIT)
    late = busy()

    host_copies.later([(bad + 1).view(torch.uint8)], used.append)
    sent = host_copies.send()
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        torch.npu.synchronize()
    host_copies.later([late], used.append)
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        host_copies.take()

    assert sent is not None
    assert sent.is_completed()
    sent.set_result(None)
    assert (used, host_copies.waiting) == ([], [])


@pytest.mark.parametrize("shape", [(3,), (200, 200), (40_000,), (0,)])
def test_the_evidence_of_a_tensor_on_a_device_is_that_of_the_same_tensor_on_the_host(shape: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape), torch.randn(shape).t(), torch.arange(9), torch.randn(5).half()]
    evidence = [Evidence(memoryview(bytearray(REGION_BYTES))) for _ in range(2)]
    for one in evidence:
        one.clear()
    _, expected = evidence[0].note(4, INPUT, "world", tensors)

    place = evidence[1].count(4, INPUT, "world")
    parts, write = evidence[1].write_later(place, [one.to("npu") for one in tensors])
    host_copies.later(parts, write)
    host_copies.take()

    assert evidence[1].left(4) == {place: expected}


def test_a_large_tensor_is_hashed_on_the_device_as_on_the_host() -> None:
    tensor = torch.randn(1000, 1000)
    on_device = tensor.to("npu")
    size, _ = torch.npu.copied_to_host()

    found = bytes(content_of(on_device))

    assert torch.npu.copied_to_host()[0] - size < 4 * tensor.numel() / 1000
    assert found == bytes(bytes_of(folded(tensor)))


# What is in the way, by its names in csrc/kind.h. A wait that must not end is given this long.
SHORTLY_S = 0.3
if_gate = pytest.mark.skipif(not _C.is_kind("gate"), reason="SIMULATED_NPU_KIND does not have gate")
if_load = pytest.mark.skipif(not _C.is_kind("load"), reason="SIMULATED_NPU_KIND does not have load")
if_lock = pytest.mark.skipif(not _C.is_kind("lock"), reason="SIMULATED_NPU_KIND does not have lock")
if_hccl = pytest.mark.skipif(_C.is_kind("nccl"), reason="groups end as NCCL's do")
if_null = pytest.mark.skipif(not _C.is_kind("null"), reason="SIMULATED_NPU_KIND does not have null")


def started(call: Callable[[], Any]) -> Future[Any]:
    """The result of a call on a thread of its own, which works on the default stream."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # the device is stopped when its test is over
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def is_stuck(result: Future[Any]) -> bool:
    return not wait([result], SHORTLY_S).done


def member_of(store: Any, rank: int, count: int = 2) -> Any:
    """One end of a communicator that its first operation makes."""
    options: Any = torch._C._distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, count
    options.timeout = timedelta(seconds=30)
    return hccl._make(options)


def members(count: int = 2) -> list[Any]:
    """A new communicator's ends, all of them in this process."""
    store = torch.distributed.HashStore()

    def member(rank: int) -> Any:
        made = member_of(store, rank, count)
        made.eager_connect_single_device(torch.device("npu", 0))
        return made

    return [one.result(30) for one in [started(partial(member, rank)) for rank in range(count)]]


def reduced(member: Any, tensor: torch.Tensor) -> Any:
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = True
    return member.allreduce([tensor], options)


@if_hccl
def test_a_device_is_stopped_before_it_is_asked_restarted_or_its_groups_resumed_and_aborted_after_that() -> None:
    for too_early in (torch.npu.restart_device, torch.npu.check_uce_in_memory):
        with pytest.raises(RuntimeError, match="that was not stopped"):
            too_early(0)
    first, second = members()
    for member in (first, second):
        reduced(member, torch.ones(3, device="npu"))
    torch.npu.synchronize()

    torch.npu.stop_device(0)

    with pytest.raises(RuntimeError, match="FORCE STOP"):
        first.abort_hccl_comm("too early")
    second.resume_hccl_comm(0)
    torch.npu.restart_device(0)
    with pytest.raises(RuntimeError, match="HcclCommResume after the device was restarted"):
        first.resume_hccl_comm(0)
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        reduced(first, torch.ones(3, device="npu"))
    first.abort_hccl_comm("in time")


def test_memory_that_nobody_has_asked_for_is_not_repaired_by_a_restart() -> None:
    bad = torch.ones(4, device="npu")
    breaking.fail_memory(bad, State.UCE_EXIT)
    for is_checked in (False, True):
        bad.add_(0)
        with pytest.raises(RuntimeError, match="UCE ERROR"):
            torch.npu.synchronize()
        torch.npu.stop_device(0)
        if is_checked:
            assert torch.npu.check_uce_in_memory(0) == 3
        torch.npu.restart_device(0, disable_tensor_unsafe_check=True)

    bad.zero_()
    torch.npu.synchronize()


@if_hccl
def test_a_process_that_has_just_started_meets_one_that_has_aborted_as_often_as_it_likes() -> None:
    store = torch.distributed.HashStore()
    ends = [member_of(store, rank) for rank in (0, 1)]
    for _ in range(3):
        works = [started(partial(reduced, end, torch.ones(3, device="npu"))) for end in ends]
        assert all(work.result(30).wait() for work in works)
        torch.npu.synchronize()
        ends[0]._delete_tcpstore_key()
        ends[0].abort_hccl_comm("reinit")
        ends[1] = member_of(store, 1)


@if_gate
def test_a_stream_whose_collective_was_aborted_is_blocked_until_that_is_issued_again() -> None:
    *tensors, other = (torch.ones(3, device="npu") for _ in range(3))
    first, _ = members()
    reduced(first, tensors[0])
    first.abort()

    event = torch.npu.Event()
    event.record()
    copied = started(other.cpu)
    with accelerator.beside():
        assert tensors[1].cpu().sum() == 3
    assert is_stuck(copied)
    assert not event.query()
    with accelerator.beside():
        for member, tensor in zip(members(), tensors, strict=True):
            reduced(member, tensor)

    assert copied.result(30).sum() == 3
    event.synchronize()


@if_null
def test_a_communicator_is_made_after_all_that_the_null_stream_was_given() -> None:
    breaking.close_gate()

    made = started(members)

    assert is_stuck(made)
    torch.npu.stop_device(0)
    assert len(made.result(30)) == 2


@if_load
def test_a_kernel_is_not_launched_for_the_first_time_while_a_stream_stands_still() -> None:
    tensor = torch.ones(3, device="npu")
    tensor.exp()
    breaking.close_gate()

    with accelerator.beside():
        assert tensor.exp().cpu().sum() > 8
    launched = started(tensor.erfinv)

    assert is_stuck(launched)


@if_lock
def test_no_other_kernel_is_launched_while_one_is_for_the_first_time() -> None:
    tensor = torch.ones(3, device="npu")
    tensor.exp()
    breaking.close_gate()

    first = started(tensor.erfinv)

    assert is_stuck(first)
    assert is_stuck(started(tensor.exp))


class Survivor:
    """As much of a rank as its recovery asks for; its journal has these operations."""

    has_collective_steps, framework = False, None

    def __init__(self, *entries: Entry) -> None:
        self.made = SimpleNamespace(living={}, left=[])
        self.mode = SimpleNamespace(is_live=True)
        self.observers = SimpleNamespace(device_in_use=lambda: torch.device("npu", 0))
        self._journal = SimpleNamespace(entries=list(entries), lock=threading.RLock())

    def __getitem__(self, kind: type) -> Any:
        return self._journal


@if_gate
def test_a_survivor_settles_and_reads_its_weights_while_the_scripts_stream_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generations, "SETTLE_LIMIT_S", SHORTLY_S)
    weights = torch.full((3,), 2.0, device="npu")
    issued = Entry(None, "allreduce", (), [])
    issued.ready = accelerator.mark()
    breaking.close_gate()

    session: Any = Survivor(issued)
    with generations.enter(session):
        generations.settle(session)
        read = weights.cpu()

    assert read.sum() == 6
    with pytest.raises(DeviceFailedError, match="has not ended its work"):
        generations.settle()


@if_gate
def test_a_survivor_that_has_issued_nothing_since_its_step_waits_for_all_that_its_device_does() -> None:
    tensor = torch.zeros(3, device="npu")
    event = torch.npu.Event()
    torch.npu._sleep(200)
    tensor.add_(1)
    event.record()

    generations.settle(Survivor())  # type: ignore[arg-type]

    assert event.query()
