"""The NPU by way of a fake torch_npu, in the signatures of three of its releases. No NPU is here."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.device.fake_npu import RELEASES, TEXTS, FakeNpu, FakeTorchNpu, Queue
from ttprun.device import npu
from ttprun.device.device_errors import HCCL_VARIABLES, ROWS, DeviceErrors, DeviceFault
from ttprun.device.interface import DeviceFailedError, DeviceMissingError, MemoryCheck
from ttprun.device.npu import NpuDevice

TABLE = DeviceErrors({})


@pytest.fixture(params=RELEASES)
def device(request: pytest.FixtureRequest) -> FakeNpu:
    return FakeNpu(request.param)


def used_in(path: Path) -> set[str]:
    """Names of torch_npu's that a file of ours asks for, as attributes of its module or by getattr, hasattr or _call."""
    used = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith((".npu", "_npu")):
            used.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "self._call"):
            used |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return used


def test_nothing_is_used_of_torch_npu_that_is_not_in_the_list_with_its_release() -> None:
    product = Path(npu.__file__).parents[1]
    of_device = used_in(product / "device" / "npu.py") | used_in(product / "device" / "interface.py")
    of_command = {name for name in used_in(product / "cli" / "software_checks.py") if name == "device_count"}
    of_groups = {name for name in used_in(product / "groups" / "device_link.py") if "hccl" in name}
    texts = [row.pattern for row in ROWS if row.library == "torch_npu"]
    alternatives = [text.replace("(?:HCCS|UB)", link) for text in texts for link in ("HCCS", "UB")]
    in_texts = {text for pattern in alternatives for text in re.findall(r"\\b([A-Z ]+)\\b", pattern)}

    used = of_device | of_command | of_groups | in_texts | {*HCCL_VARIABLES}

    assert used - {"npu", "__version__", "version"} == {*npu.NAMES}


@pytest.mark.parametrize(
    ("release", "arguments"),
    [
        ("2.1.0.post8", ["device_id", "rebuild_all_resources"]),
        ("2.7.1", ["device_id", "rebuild_all_resources"]),
        ("2.13.0", ["device_id", "rebuild_all_resources", "disable_tensor_unsafe_check"]),
    ],
)
def test_the_fake_has_the_signatures_of_its_release(release: str, arguments: list[str]) -> None:
    module = FakeTorchNpu(release)

    assert list(inspect.signature(module.npu.restart_device).parameters) == arguments
    assert list(inspect.signature(module.reinit_process_group).parameters) == ["group", "rebuild_link"]
    assert module.npu.stop_device(0) == (None if release == "2.1.0.post8" else 0)


def test_an_npu_says_what_it_is(device: FakeNpu) -> None:
    found = device.identify()

    assert (found.kind, found.index) == ("npu", 0)
    assert "fake" in found.name
    assert "fake" in found.versions["torch_npu"]


def test_memory_that_a_living_tensor_holds_is_persistent_and_safe_again_once_it_is_marked(device: FakeNpu) -> None:
    weights, fake = torch.zeros(4), device.module.npu
    fake.fail_memory(weights)
    with pytest.raises(RuntimeError) as error:
        fake.operate([weights])
    device.stop()
    found = device.check_memory()
    device.restart()
    with pytest.raises(RuntimeError, match="There is unsafe data in the input tensor"):
        fake.operate([weights])
    device.mark_safe(weights)
    fake.operate([weights])

    assert TABLE.diagnose(error.value).fault is DeviceFault.MEMORY_PERSISTENT
    assert found is MemoryCheck.PERSISTENT
    assert device.check_memory() is MemoryCheck.NONE
    assert device.health().is_usable
    assert (fake.stops, fake.marked) == (1, 1)


def test_memory_that_was_given_back_is_safe_for_whoever_takes_it_next(device: FakeNpu) -> None:
    lost, fake = torch.zeros(4), device.module.npu
    fake.fail_memory(lost)
    device.restart()
    same_place = torch.from_numpy(lost.numpy())
    del lost

    fake.operate([same_place])


def test_memory_that_nothing_holds_any_more_is_temporary(device: FakeNpu) -> None:
    activation = torch.zeros(4)
    device.module.npu.fail_memory(activation)
    del activation

    assert device.check_memory() is MemoryCheck.TEMPORARY


def test_memory_of_a_library_is_outside_the_pool(device: FakeNpu) -> None:
    device.module.npu.fail_memory_of_library()

    assert device.check_memory() is MemoryCheck.OUTSIDE_POOL


def test_after_an_ecc_error_memory_counts_as_persistent_whoever_held_it(device: FakeNpu) -> None:
    activation = torch.zeros(4)
    device.module.npu.fail_memory(activation, Queue.HBM_ECC_EXIT)
    del activation
    device.stop()

    assert device.check_memory() is MemoryCheck.PERSISTENT


def test_a_device_that_was_stopped_refuses_all_work_until_it_is_restarted(device: FakeNpu) -> None:
    device.stop()
    stopped = device.health()
    device.restart()

    assert not stopped.is_usable
    assert stopped.findings[0].startswith("forced-stop: RuntimeError: ")
    assert device.health().is_usable


def test_a_lost_device_fails_in_everything_and_says_what_it_was_asked(device: FakeNpu) -> None:
    device.module.npu.lose()

    with pytest.raises(DeviceFailedError, match="check_uce_in_memory failed for NPU 0"):
        device.check_memory()
    with pytest.raises(DeviceFailedError, match="restart_device failed for NPU 0"):
        device.restart()
    with pytest.raises(DeviceMissingError, match="npu-smi info"):
        device.identify()
    assert device.health().findings[0].startswith("device-lost: ")


def test_a_device_that_cannot_be_stopped_says_so_where_its_release_answers_at_all() -> None:
    for release, answers in zip(RELEASES, (False, True, True), strict=True):
        device = FakeNpu(release)
        device.module.npu.lose()
        if answers:
            with pytest.raises(DeviceFailedError, match="stop_device answers 1 for NPU 0"):
                device.stop()
        else:
            device.stop()


def test_links_that_hold_are_resumed_for_all_groups_at_once(device: FakeNpu) -> None:
    device.rebuild_communicators()

    assert device.module.npu.rebuilt == [(None, False)]


def test_what_a_release_does_not_have_is_named() -> None:
    class OldNpu:
        """torch_npu.npu of a release before recovery came."""

    class OldTorchNpu:
        __version__ = "1.11"
        npu = OldNpu()

    device = NpuDevice(OldTorchNpu(), 0, reinit=None)

    with pytest.raises(DeviceFailedError, match=r"torch_npu 1\.11 has no stop_device"):
        device.stop()
    with pytest.raises(DeviceFailedError, match=r"torch_npu 1\.11 has no reinit_process_group"):
        device.rebuild_communicators()


def test_an_answer_that_nobody_knows_is_a_failure() -> None:
    class OddNpu:
        def check_uce_in_memory(self, device_id: int) -> int:
            return 9

    class OddTorchNpu:
        __version__ = "9"
        npu = OddNpu()

    with pytest.raises(DeviceFailedError, match="check_uce_in_memory answers 9 for NPU 0"):
        NpuDevice(OddTorchNpu(), 0, None).check_memory()


@pytest.mark.parametrize("queue", list(TEXTS))
def test_whatever_the_fake_raises_is_in_the_table(queue: Queue) -> None:
    device = FakeNpu()
    device.module.npu.queue = queue

    assert TABLE.diagnose(device.module.npu.error()).is_known


@pytest.mark.parametrize(
    ("source", "reported"),
    [
        (None, "torch_npu is not installed; for an NPU: pip install 'ttprun[npu]'"),
        ("raise ImportError('libhccl.so: cannot open shared object file')", "ImportError: libhccl.so: cannot open"),
        ("raise RuntimeError('Two accelerators cannot be used at the same time')", "RuntimeError: Two accelerators"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
    ],
)
def test_a_torch_npu_that_cannot_be_loaded_is_reported_in_one_line_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, reported: str
) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if source is not None:
        (tmp_path / "torch_npu.py").write_text(source)

    with pytest.raises(DeviceMissingError) as error:
        npu.load()

    assert reported in str(error.value)
    assert "\n" not in str(error.value)
    if source is not None:
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0: without that 'import torch' itself fails" in str(error.value)
