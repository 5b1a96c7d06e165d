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
import torch.nn.functional as F
import torch_npu
from torch import nn
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


def test_seeding_and_counting_makes_no_context() -> None:
    code = "import torch; torch.manual_seed(1); torch.npu.device_count(); torch.npu.get_rng_state(); "
    code += "assert not torch.npu.is_initialized(); torch.ones(1, device='npu'); assert torch.npu.is_initialized()"

    assert os.system(f'{os.sys.executable} -c "{code}"') == 0


def test_the_generic_interface_finds_it() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == torch.npu.device_count() == 8
    assert torch.get_device_module("npu") is torch.npu is torch_npu.npu
    assert torch.ones(1, device="npu").device == torch.device("npu:0")


def test_a_tensor_is_not_the_cpus() -> None:
    tensor = torch.arange(3.0, device="npu")

    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        tensor.numpy()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        tensor + torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        tensor + torch.ones(3, device="npu:1")


def test_each_thread_has_a_device_and_a_tensor_stays_on_its_own() -> None:
    with torch.npu.device(1):
        there = torch.ones(2, device="npu")
        assert torch.npu.current_device() == 1

    assert torch.npu.current_device() == 0
    assert there.device.index == (there * 2).device.index == 1
    assert there.to("npu:0").sum().item() == 2
    with pytest.raises(RuntimeError, match="invalid device"):
        torch.npu.set_device(8)


def test_each_device_has_a_generator_of_its_own() -> None:
    torch.manual_seed(3)
    states = torch.npu.get_rng_state_all()
    on_host = torch.get_rng_state()

    first = torch.rand(4, device="npu")
    again = F.dropout(torch.ones(64, device="npu"))

    assert not torch.equal(states[0], torch.npu.get_rng_state(0))
    assert torch.equal(states[1], torch.npu.get_rng_state(1))
    assert torch.equal(on_host, torch.get_rng_state())
    torch.npu.set_rng_state_all(states)
    assert torch.equal(first, torch.rand(4, device="npu"))
    assert torch.equal(again, F.dropout(torch.ones(64, device="npu")))
    assert torch.equal(torch.rand(4, device="npu:1").cpu(), first.cpu())


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
    is_first_done = torch.npu.current_stream().query()

    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        seen = result[0, 0].clone()
    assert other.sum().item() == 4
    assert not is_first_done
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_trains_and_the_scaler_skips_what_overflows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("npu", init_scale=2.0**40 if dtype is torch.float16 else 1.0)
    images, labels = torch.randn(8, 1, 8, 8).pin_memory(), torch.arange(8) % 3
    losses = []

    for _ in range(60):
        with torch.amp.autocast("npu", dtype=dtype):
            logits = model(images.to("npu", non_blocking=True))
            loss = F.cross_entropy(logits, labels.to("npu"))
        assert (logits.dtype, loss.dtype) == (dtype, torch.float32)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

    assert losses[-1] < losses[0] / 2
    assert (scaler.get_scale() < 2.0**40) is True


def test_batch_norm_is_the_cpus_also_when_it_is_not_training() -> None:
    norm, images = nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    on_device = nn.BatchNorm2d(3).to("npu")
    both = [(norm(images), on_device(images.to("npu")))]

    norm.eval(), on_device.eval()
    both.append((norm(images), on_device(images.to("npu"))))

    assert all(torch.equal(expected, result.cpu()) for expected, result in both)


def test_what_is_copied_to_the_host_is_counted() -> None:
    tensor = torch.ones(64, device="npu")
    size, count = torch.npu.copied_to_host()

    tensor.cpu()
    tensor[0].item()
    tensor + tensor

    assert torch.npu.copied_to_host() == (size + 256 + 4, count + 2)


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


def test_memory_is_counted_kept_and_given_back() -> None:
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    held = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before == 1 << 20

    del held
    torch.npu.synchronize()
    assert torch.npu.memory_allocated() == before
    assert torch.npu.memory_reserved() >= before + (1 << 20)
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() < before + (1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(torch.npu.mem_get_info()[1] + 1, dtype=torch.uint8, device="npu")


def test_a_forked_process_cannot_use_the_devices_of_its_parent() -> None:
    torch.ones(1, device="npu").sum().item()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="npu")
        except RuntimeError as error:
            os._exit(0 if "in forked subprocess" in str(error) else 1)
        os._exit(2)

    assert os.waitpid(child, 0)[1] == 0


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


def test_memory_that_nobody_holds_any_more_is_temporary() -> None:
    bad = torch.ones(4, device="npu")
    breaking.fail_memory(bad)
    bad.add_(1)
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        torch.npu.synchronize()

    del bad
    assert torch.npu.check_uce_in_memory(0) == 2


def test_after_an_ecc_error_memory_counts_as_persistent_whoever_held_it() -> None:
    bad = torch.ones(4, device="npu")
    breaking.fail_memory(bad, State.HBM_ECC_EXIT)
    bad.add_(1)
    torch.npu.stop_device(0)

    del bad
    assert torch.npu.check_uce_in_memory(0) in (0, 3)  # 0: it was stopped before it was read


def test_a_stopped_device_ends_what_runs_and_refuses_all_else() -> None:
    results = [busy() for _ in range(20)]

    assert torch.npu.stop_device(0) == 0
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        torch.ones(1, device="npu")
    torch.npu.restart_device(0)
    assert torch.ones(2, device="npu").sum().item() == 2
    assert results[-1][0, 0].item() != TOO_LONG**2  # it was not waited for


def test_a_lost_device_fails_in_everything() -> None:
    with torch.npu.device(7):
        torch.ones(1, device="npu")
        breaking.lose_device()

        with pytest.raises(RuntimeError, match="reason=\\[lost heartbeat\\], error code is 507010"):
            torch.npu.synchronize()
        assert torch.npu.stop_device(7) == 1
        with pytest.raises(RuntimeError, match="507010"):
            torch.npu.restart_device(7)


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


def test_the_watchdog_that_may_not_end_the_process_sleeps_and_a_destructor_waits_for_it(tmp_path: Path) -> None:
    handling = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}
    long = failed_collective(tmp_path, TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC="3000", **handling)
    never = {"TORCH_HCCL_DUMP_ON_TIMEOUT": "0", "TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC": "600000"}
    none = failed_collective(tmp_path, **never, **handling)

    assert (long.returncode, none.returncode) == (0, 0), long.stderr + none.stderr
    assert float(long.stdout) > 0.5
    assert float(none.stdout) < 60  # which it would take unless it is switched off


def test_sync_batch_norms_kernels_give_what_batch_norm_gives() -> None:
    torch.manual_seed(1)
    images, grad = torch.randn(6, 3, 4, 4), torch.randn(6, 3, 4, 4)
    weight, bias = torch.rand(3), torch.rand(3)
    leaf = images.clone().requires_grad_()
    factor, offset = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    expected = F.batch_norm(leaf, None, None, factor, offset, True, 0.1, 1e-5)
    expected.backward(grad)

    x, dy, w, b = (tensor.to("npu") for tensor in (images, grad, weight, bias))
    parts = [torch.batch_norm_stats(part, 1e-5) for part in (x[:2], x[2:])]
    counts = torch.tensor([32.0, 64.0], device="npu")
    means, inverses = (torch.stack(found) for found in zip(*parts, strict=True))
    mean, inverse = torch.batch_norm_gather_stats_with_counts(x, means, inverses, None, None, 0.1, 1e-5, counts)
    out = torch.batch_norm_elemt(x, w, b, mean, inverse, 1e-5)
    sums = torch.batch_norm_backward_reduce(dy, x, mean, inverse, w, True, True, True)
    dx = torch.batch_norm_backward_elemt(dy, x, mean, inverse, w, sums[0], sums[1], counts.int())

    torch.testing.assert_close(out.cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.cpu(), leaf.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums[2].cpu(), factor.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[3].cpu(), offset.grad, rtol=1e-4, atol=1e-4)


def test_freed_memory_is_handed_out_at_once_on_its_own_stream_only() -> None:
    first = torch.ones(4096, device="npu")
    address = first.data_ptr()
    slow = busy()
    late = first + slow[0, 0]
    del first
    again = torch.zeros(4096, device="npu")
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        other = torch.zeros(4096, device="npu")

    assert again.data_ptr() == address
    assert other.data_ptr() != address
    assert late[0].item() == TOO_LONG**2 + 1


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


def noisy_gradients() -> list[int]:
    code = """
import sys, torch
torch.use_deterministic_algorithms(len(sys.argv) > 1)
table = torch.ones(8, 4, device="npu", requires_grad=True)
found = set()
for _ in range(40):
    table.grad = None
    (torch.nn.functional.embedding(torch.tensor([1, 1, 2], device="npu"), table) * 0.3).sum().backward()
    found.add(str(table.grad.flatten().view(torch.int32).tolist()))
print(len(found))
"""
    counts = []
    for more in ([], ["deterministic"]):
        command = [sys.executable, "-X", "faulthandler", "-c", code, *more]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout))
    return counts


def test_noise_is_in_a_backward_kernel_unless_deterministic_algorithms_are_asked_for() -> None:
    some, one = noisy_gradients()

    assert some > 1
    assert one == 1


def test_while_a_graph_is_captured_nothing_runs_and_nothing_may_be_asked() -> None:
    total, one = torch.zeros(1, device="npu"), torch.ones(1, device="npu")
    event = torch.npu.Event()
    event.record()
    event.synchronize()
    graph = torch.npu.NPUGraph()

    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        total.add_(one)
        for ask in (event.query, event.synchronize, total.item, total.cpu, torch.npu.synchronize):
            with pytest.raises(RuntimeError, match="operation not permitted when a stream is capturing"):
                ask()

    assert total.item() == 0
    graph.replay()
    graph.replay()
    assert total.item() == 2


HOLDS_MEMORY = """
import os, signal, sys, torch
held = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
if sys.argv[1] == "killed": os.kill(os.getpid(), signal.SIGKILL)
"""
SEES_MEMORY = """
import sys, time, torch
torch.empty(1, device="npu")
free, total = torch.npu.mem_get_info()
print(total - free >= 1 << 20)
time.sleep(1.2)
free, total = torch.npu.mem_get_info()
print(total - free >= 1 << 20)
"""


@pytest.mark.parametrize(("end", "seen"), [("killed", "True False"), ("well", "False False")])
def test_memory_of_a_killed_process_returns_a_second_later(tmp_path: Path, end: str, seen: str) -> None:
    environment = {**os.environ, "SIMULATED_NPU_MEMORY": str(tmp_path)}
    subprocess.run([sys.executable, "-c", HOLDS_MEMORY, end], env=environment, check=False)

    done = subprocess.run(
        [sys.executable, "-c", SEES_MEMORY], env=environment, check=True, capture_output=True, text=True
    )

    assert done.stdout.split() == seen.split()
