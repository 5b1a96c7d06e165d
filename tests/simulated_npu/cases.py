"""What the simulated NPU does as a real one would; tests/device/test_simulated_npu.py runs it in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch_npu import breaking
from torch_npu.breaking import State

from ttprun.capture.records.evidence import REGION_BYTES, Evidence
from ttprun.introspect import host_copies
from ttprun.introspect.current_rank import INPUT
from ttprun.introspect.tensor_bytes import bytes_of, content_of, folded, plain_together

TOO_LONG = 1200  # a product of matrices of this size runs for a while


@pytest.fixture(autouse=True)
def _whole_device() -> Iterator[None]:
    yield
    torch.npu.stop_device(0)
    torch.npu.restart_device(0, disable_tensor_unsafe_check=True)
    torch.distributed.reinit_process_group(None, False)


def busy() -> torch.Tensor:
    """Work that the device has begun, and not ended."""
    large = torch.ones(TOO_LONG, TOO_LONG, device="npu")
    return large @ large @ large


def test_work_runs_late_and_an_event_says_when() -> None:
    result = busy()
    event = torch.npu.Event()
    event.record()

    assert not event.query()
    assert not torch.npu.current_stream().query()
    event.synchronize()
    assert event.query()
    assert result[0, 0].item() == TOO_LONG**2


def test_streams_run_beside_each_other_and_wait_for_events_only() -> None:
    side = torch.npu.Stream()
    result = busy()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
        other = torch.ones(2, device="npu") + 1
    side.synchronize()

    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        seen = result[0, 0].clone()
    assert other.sum().item() == 4
    side.synchronize()
    assert seen.item() == TOO_LONG**2


def test_a_copy_to_pinned_memory_is_late_and_others_are_not() -> None:
    pinned, pageable = torch.zeros(1).pin_memory(), torch.zeros(1)
    assert (pinned.is_pinned(), pageable.is_pinned()) == (True, False)

    pinned.copy_(busy()[0, :1], non_blocking=True)
    at_once = pinned.item()
    pageable.copy_(busy()[0, :1], non_blocking=True)

    assert (at_once, pageable.item()) == (0, TOO_LONG**2)
    assert pinned.item() == TOO_LONG**2


def test_an_error_of_a_kernel_comes_late_and_stays() -> None:
    table = torch.zeros(4, 2, device="npu")
    torch.index_select(table, 0, torch.tensor([9], device="npu"))

    with pytest.raises(RuntimeError, match="error code is 507015"):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="error code is 507015"):
        table + 1


def test_small_tensors_are_copied_together_whatever_their_types() -> None:
    expected = [torch.arange(7), torch.randn(3, 5).half(), torch.tensor(1.5), torch.ones(9).bool()]
    tensors = [one.to("npu") for one in expected]
    _, count = torch.npu.copied_to_host()

    found = plain_together([torch.zeros(2), *tensors, torch.ones(0, device="npu")])

    assert torch.npu.copied_to_host()[1] == count + 1
    assert all(one.is_cpu and torch.equal(one, other) for one, other in zip(found[1:-1], expected, strict=True))
    assert [one.dtype for one in found[1:-1]] == [one.dtype for one in expected]


def test_each_wait_for_the_device_is_counted_and_work_that_is_only_given_to_it_is_not() -> None:
    tensor = torch.ones(64, device="npu")
    event, count = torch.npu.Event(), torch.npu.drains()

    event.record()
    torch.empty(64, pin_memory=True).copy_(tensor + tensor, non_blocking=True)
    event.query()
    assert torch.npu.drains() == count
    tensor.cpu()
    tensor[0].item()
    event.synchronize()
    torch.npu.synchronize()

    assert torch.npu.drains() == count + 4


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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (State.UCE_EXIT, "UCE ERROR, error code is 507053"),
        (State.HBM_ECC_EXIT, r"HBM MULTI BIT ECC ERROR.time us= \d+"),
    ],
)
def test_a_read_of_failed_memory_is_found_late_and_names_the_error(kind: State, text: str) -> None:
    bad, good = torch.ones(4, device="npu"), torch.ones(4, device="npu")
    breaking.fail_memory(bad, kind)

    assert good.sum().item() == 4  # nobody has read it so far
    bad + good
    with pytest.raises(RuntimeError, match=text):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match=text):
        good + good


def test_persistent_memory_is_unsafe_after_a_restart_until_it_is_marked() -> None:
    bad, good = torch.ones(4, device="npu"), torch.ones(4, device="npu")
    breaking.fail_memory(bad)
    bad.add_(1)
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        torch.npu.synchronize()

    assert torch.npu.stop_device(0) == 0
    assert torch.npu.check_uce_in_memory(0) == 3
    assert torch.npu._get_uce_addr() == [{"ptr": bad.data_ptr(), "size": 16}]
    torch.npu.restart_device(0)

    with pytest.raises(RuntimeError, match="There is unsafe data in the input tensor"):
        bad.sum()
    bad.copy_(good)
    torch.npu._recovery.update_npu_tensor_to_safe(bad)
    assert bad.sum().item() == 4
    assert torch.npu.check_uce_in_memory(0) == 0


def test_a_stopped_device_ends_what_runs_and_refuses_all_else() -> None:
    results = [busy() for _ in range(20)]

    assert torch.npu.stop_device(0) == 0
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        torch.ones(1, device="npu")
    torch.npu.restart_device(0)
    assert torch.ones(2, device="npu").sum().item() == 2
    assert results[-1][0, 0].item() != TOO_LONG**2  # it was not waited for


FAILED_COLLECTIVE = """
import os, sys, time, torch, torch.distributed as dist
from torch_npu import breaking
dist.init_process_group("hccl", init_method="file://" + sys.argv[1], rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("npu"))
tensor = torch.ones(2, device="npu")
breaking.fail_memory(tensor)
work = dist.all_reduce(tensor, async_op=True)
while not work.is_completed(): time.sleep(0.01)
time.sleep(0.5)
begun = time.monotonic()
dist.destroy_process_group()
del work, backend
print(time.monotonic() - begun)
os._exit(0)
"""


def failed_collective(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FAILED_COLLECTIVE, str(folder / "store")],
        env={**os.environ, "TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_watchdog_ends_the_process_of_a_failed_collective(tmp_path: Path) -> None:
    done = failed_collective(tmp_path)

    assert done.returncode == -signal.SIGABRT
    assert "HCCL watchdog thread ends the process: operator():simulated NPU function error: UCE ERROR" in done.stderr


@pytest.mark.parametrize("is_recorded", [True, False])
def test_memory_that_another_stream_still_uses_holds_garbage_unless_that_was_recorded(is_recorded: bool) -> None:
    torch.npu.empty_cache()  # so that the next one asked for is the one given back
    source = torch.ones(4096, device="npu")
    torch.npu.synchronize()
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        busy()
        seen = source + 0
    if is_recorded:
        source.record_stream(side)

    del source
    torch.empty(4096, device="npu")
    torch.npu.current_stream().synchronize()
    side.synchronize()

    assert (seen.tolist() == [1.0] * 4096) is is_recorded
