"""Which errors are answered by another run of the script in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.device.fake_npu import FakeNpu, Queue
from tests.options import OPTIONS
from tests.rank.fakes import become, make_session
from tests.rank.test_strikes import Line
from ttprun.device.device_errors import DeviceErrors, DeviceFault, UpdateTimes, diagnosis_of, now_us
from ttprun.device.interface import DeviceFailedError
from ttprun.introspect.current_rank import ScriptGroups, current
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Options
from ttprun.rank.bootstrap import rerun
from ttprun.rank.bootstrap.rerun import is_transient
from ttprun.rank.step import step_hooks

ADDITIONS = {"^ValueError: parity": "memory-temporary", "UCE ERROR": "unknown"}


@pytest.mark.parametrize(
    ("error", "retry_on", "additions", "expected"),
    [
        (RuntimeError("UCE ERROR"), [], {}, True),
        (RuntimeError("FORCE STOP"), [], {}, True),
        (RuntimeError("HCCS LINK ERROR"), [], {}, True),  # the script has been left: reconnecting is not enough
        (RuntimeError("CUDA error: misaligned address"), [], {}, False),
        (RuntimeError("CUDA error: misaligned address"), ["CUDA error"], {}, False),  # the process could do nothing
        (RuntimeError("PRECISION ERROR"), ["."], {}, False),
        (RuntimeError("out of memory"), [], {}, False),
        (RuntimeError("out of memory"), ["^RuntimeError: out of"], {}, True),
        (ValueError("parity"), [], ADDITIONS, True),
        (RuntimeError("UCE ERROR"), [], ADDITIONS, False),
        (RuntimeError("UCE ERROR"), ["UCE"], ADDITIONS, True),
    ],
)
def test_what_the_device_says_comes_before_what_the_user_says(
    error: Exception, retry_on: list[str], additions: dict[str, str], expected: bool
) -> None:
    assert is_transient(error, DeviceErrors(additions).diagnose(error), retry_on) is expected


# What the device is asked, before a rank is kept.


class FakePresence:
    """As much of a Presence as is asked before the script's run is left."""

    def __init__(self, options: Options) -> None:
        self.welcome = SimpleNamespace(options=options, is_replacement=False)
        self.channel = Line()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNpu]:
    fake = FakeNpu()
    fake.install(monkeypatch)
    line: Any = Line()
    session = make_session(channel=line, made=ScriptGroups(living={"": object()}))
    session.options = replace(OPTIONS, retry_on=["out of memory"])
    become(session)
    yield fake
    become(None)


def asked(error: Exception) -> tuple[bool, str, bool, list[str]]:
    """Whether the rank is kept, the fault, whether its device is to be made ready, and what is reported to the agent."""
    presence: Any = FakePresence(OPTIONS)
    session, diagnosis, device = rerun._session_to_leave(error, presence)
    return session is not None, diagnosis.name, device is not None, [note.text for note in presence.channel.sent]


def test_a_device_is_stopped_and_says_which_memory_has_failed(device: FakeNpu) -> None:
    weights = torch.zeros(4)
    device.module.npu.fail_memory(weights)

    kept = asked(device.module.npu.error())

    assert kept == (True, "memory-persistent", True, [])
    assert device.module.npu.queue is Queue.STOP_EXIT


def test_memory_that_nothing_holds_needs_no_rebuild(device: FakeNpu) -> None:
    device.module.npu.fail_memory(torch.zeros(4))

    assert asked(RuntimeError("UCE ERROR")) == (True, "memory-temporary", True, [])


def test_memory_that_failed_with_an_ecc_error_since_the_newest_step_began_is_repaired_in_the_same_process(
    device: FakeNpu,
) -> None:
    session = current()
    assert session is not None
    weights = torch.zeros(4)
    session.updates.begin()
    device.module.npu.fail_memory(weights, Queue.HBM_ECC_EXIT)
    error = device.module.npu.error()

    kept = asked(error)
    diagnosis = session.diagnose(error)
    rerun._make_ready(device, diagnosis)  # the device calls it persistent, though nothing is held

    assert diagnosis.fault is DeviceFault.MEMORY_PERSISTENT
    assert kept == (True, "memory-persistent", True, [])
    assert device.module.npu.queue is Queue.RUN


def test_memory_that_failed_with_an_ecc_error_before_the_newest_step_costs_the_process(device: FakeNpu) -> None:
    session = current()
    assert session is not None
    device.module.npu.fail_memory(torch.zeros(4), Queue.HBM_ECC_EXIT)
    error = device.module.npu.error()
    session.updates = UpdateTimes(lambda: now_us() + 1_000_000)
    session.updates.begin()

    assert asked(error) == (False, "memory-corrupted", False, [])
    assert device.module.npu.queue is Queue.HBM_ECC_EXIT


def test_the_newest_step_of_an_optimizer_is_noted_for_errors_that_name_their_time() -> None:
    times = iter((5, 6, 7, 8))
    updates = UpdateTimes(lambda: next(times))
    line: Any = Line()
    session = make_session(channel=line, unprotected=Reason(text="nothing else is looked at"), updates=updates)
    become(session)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    step_hooks.before_step(optimizer, (), {})
    during = updates.start_us, updates.end_us
    step_hooks.after_step(optimizer, (), {})
    behind = updates.start_us, updates.end_us
    become(None)

    assert (during, behind) == ((5, 0), (5, 6))


def test_memory_outside_the_pool_costs_the_process(device: FakeNpu) -> None:
    device.module.npu.fail_memory_of_library()

    reason = "the script is not run again in the same process: its device says memory-outside-pool"
    assert asked(RuntimeError("UCE ERROR")) == (False, "memory-outside-pool", False, [reason])


def test_a_device_that_cannot_be_stopped_costs_the_process(device: FakeNpu) -> None:
    device.module.npu.lose()

    kept, fault, _, notes = asked(RuntimeError("UCE ERROR"))

    assert (kept, fault) == (False, "device-lost")
    assert "stop_device answers 1 for NPU 0" in notes[0]


def test_an_error_that_is_none_of_the_device_leaves_it_alone(device: FakeNpu) -> None:
    assert asked(RuntimeError("out of memory")) == (True, "", False, [])
    assert device.module.npu.queue is Queue.RUN


def test_tensors_that_outlive_the_run_cost_the_process(device: FakeNpu) -> None:
    weights = torch.zeros(4)
    device.module.npu.fail_memory(weights)

    with pytest.raises(DeviceFailedError, match="tensors outlive the script's run"):
        rerun._make_ready(device, diagnosis_of(DeviceFault.MEMORY_PERSISTENT))
    del weights
    rerun._make_ready(device, diagnosis_of(DeviceFault.MEMORY_PERSISTENT))

    assert device.module.npu.queue is Queue.RUN
    assert device.module.npu.rebuilt == [(None, False)]
