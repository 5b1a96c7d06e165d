"""`ttprun doctor`: on this machine, on ones made to look worse, and what it says of devices that are not here."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.runs import status_of, write_run
from ttprun.chaos.trial.twins import Launch, Twin
from ttprun.cli import doctor, machine_checks, software_checks
from ttprun.cli.machine_checks import Finding
from ttprun.cli.main import main
from ttprun.cli.software_checks import SHIM, Probe, accelerators, cann_version, software

WELL: dict[str, Any] = {
    "hooks": str(SHIM / "sitecustomize.py"), "torch": "2.13.0+cpu", "cuda": None, "import_s": 1.5,
    "backends": ["gloo"], "devices": [], "missing": [],
}  # fmt: skip
GPU: dict[str, Any] = {
    "kind": "cuda", "name": "NVIDIA H100", "index": 0, "versions": {"CUDA": "12.8", "driver": "570.1"},
    "is_usable": True, "findings": [], "total_bytes": 80 << 30, "free_bytes": 70 << 30,
}  # fmt: skip
DOCTOR = "import sys, ttprun.cli.main as m; code = m.main({!r}); sys.exit(9 if 'torch' in sys.modules else code)"


def examine(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real doctor in an empty directory; exit code 9 would say that it has imported torch itself."""
    return subprocess.run(
        [sys.executable, "-c", DOCTOR.format(["doctor", *arguments])],
        cwd=tmp_path, env=dict(os.environ) | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def by_subject(findings: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def reported(done: subprocess.CompletedProcess[str]) -> dict[str, Finding]:
    return by_subject(Finding(**finding) for finding in json.loads(done.stdout)["findings"])


def python_path(*paths: Path) -> str:
    return os.pathsep.join((*map(str, paths), os.environ.get("PYTHONPATH", "")))


# The whole of it.


def test_this_machine_can_train_with_recovery_and_nothing_is_left_behind(tmp_path: Path) -> None:
    done = examine(tmp_path, "--json")

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"]
    found = reported(done)
    areas = {finding.area for finding in found.values()}
    assert areas == {"software", "devices", "kernel", "limits", "network", "files"}
    assert {"torch", "repair", "backends", "hooks", "py-spy", "memfd, futex", "open files", "ports"} <= found.keys()
    assert {"locked memory", "core files", "/dev/shm", "loopback", "signals", "this directory"} <= found.keys()
    assert all(finding.means or finding.cure for finding in found.values() if finding.level != "ok")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_run", [True, False])
def test_a_report_has_what_was_found_and_the_newest_run_but_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Finding("limits", "open files", "64", "note", "few", "raise it")
    monkeypatch.setattr(doctor, "all_findings", lambda: [found])
    if has_run:
        run = write_run(tmp_path / "ttprun-runs" / "one", status_of(state="done", exit_code=0))
        run.config.write_text("# ttprun train.py --api-key s3cret\non_event: curl https://s3cret@x\nstandbys: 1\n")

    code = main(["doctor", "--report"])

    text = (tmp_path / "ttprun-report.md").read_text()
    assert (code, "s3cret" in text, "* torch " in text) == (0, False, True)
    assert "    note   limits    open files                64  few  raise it\n" in text
    shown = ("Done after step 50 on 4 ranks", '"incidents"', "train.py --api-key (hidden)", "standbys: 1", "## Newest")
    assert [words in text for words in (*shown, "there is no run in")] == [has_run] * len(shown) + [not has_run]


def test_a_file_that_is_no_report_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("import torch\n")

    assert [main(["doctor", *asked, f"{tmp_path}/train.py"]) for asked in (["--report"], [])] == [2, 2]
    assert "is there, and is no report" in capsys.readouterr().err


@pytest.fixture
def path_with_torch_npu(tmp_path: Path) -> str:
    """A stand-in for the package as pip leaves it: its entry point makes `import torch` itself fail."""
    site = tmp_path / "site"
    info = site / "torch_npu-2.13.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (site / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    return python_path(site)


def test_torch_npu_without_cann_is_reported_as_what_breaks_torch(tmp_path: Path, path_with_torch_npu: str) -> None:
    broken = examine(tmp_path, "--json", PYTHONPATH=path_with_torch_npu)

    assert broken.returncode == 1
    found = reported(broken)
    assert found["torch's backends"].level == "fails"
    assert found["torch's backends"].found.startswith("RuntimeError: Failed to load the backend extension: torch_npu")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["torch's backends"].cure
    assert found["torch"].level == "ok"  # what it would be without the extension


@pytest.mark.slow
def test_torch_npu_without_cann_is_reported_if_torch_does_not_load_it(tmp_path: Path, path_with_torch_npu: str) -> None:
    switched_off = examine(tmp_path, "--json", PYTHONPATH=path_with_torch_npu, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    assert switched_off.returncode == 0
    assert "libhccl.so" in reported(switched_off)["torch_npu"].means
    assert reported(switched_off)["CANN"].found == "not found"


@pytest.mark.parametrize(
    ("source", "found", "cure"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
            "No module named",
            "pip install torch",
        ),
        ("import os; os.abort()", "the process that imported it has ended: exit code -6", "import torch"),
        (
            "raise OSError('libcudart.so.12: cannot open shared object file')",
            "OSError: libcudart.so.12",
            "import torch",
        ),
    ],
)
def test_a_torch_that_cannot_be_imported_fails_and_does_not_end_the_doctor(
    tmp_path: Path, source: str, found: str, cure: str
) -> None:
    (tmp_path / "torch.py").write_text(source)

    done = examine(tmp_path, "--json", PYTHONPATH=python_path(tmp_path))

    assert done.returncode == 1
    assert found in reported(done)["torch"].found
    assert cure in reported(done)["torch"].cure
    assert reported(done)["pidfd"].level == "ok"


def test_a_torch_that_never_answers_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal; signal.pause()")
    probe = Probe(dict(os.environ) | {"PYTHONPATH": python_path(tmp_path)})

    assert probe.read(limit_s=1.0) == {"error": "it has not answered within 1 s"}


def no_repair(version: str, pair: object) -> list[Finding]:
    """Takes the place of `repair`, which runs a real job."""
    return [Finding("software", "repair", f"not tried on {version}")]


class FakeProbe:
    """Takes the place of Probe: torch has answered that all is well."""

    def read(self) -> dict[str, Any]:
        return WELL


def breaking() -> Iterator[Finding]:
    yield Finding("kernel", "first", "works")
    raise RuntimeError("no such file")


def failing() -> Iterator[Finding]:
    yield Finding("kernel", "pidfd", "Function not implemented", "fails", "exits are not seen", "use another kernel")


def test_a_check_that_breaks_is_a_note_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "Probe", FakeProbe)
    monkeypatch.setattr(doctor, "repair", no_repair)
    monkeypatch.setattr(doctor, "CHECKS", (breaking, machine_checks.signals))

    code = main(["doctor", "--json"])

    findings = json.loads(capsys.readouterr().out)["findings"]
    assert code == 0
    assert [finding["subject"] for finding in findings[:3]] == ["first", "check", "signals"]
    assert findings[1]["found"] == "could not be checked (RuntimeError: no such file)"


def test_one_thing_that_fails_is_named_in_the_verdict_with_its_cure_above(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "Probe", FakeProbe)
    monkeypatch.setattr(doctor, "repair", no_repair)
    monkeypatch.setattr(doctor, "CHECKS", (failing,))

    code = main(["doctor"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[-1] == "training with recovery cannot work here: pidfd"
    (failed,) = [line for line in lines if line.startswith("FAILS")]
    assert failed.endswith("use another kernel")


def test_each_row_is_printed_while_the_next_one_is_still_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def looks() -> Iterator[Finding]:
        printed.append(capsys.readouterr().out)
        yield Finding("kernel", "second", "works")
        printed.append(capsys.readouterr().out)

    monkeypatch.setattr(doctor, "Probe", FakeProbe)
    monkeypatch.setattr(doctor, "repair", no_repair)
    monkeypatch.setattr(doctor, "CHECKS", (machine_checks.signals, looks))

    main(["doctor"])

    assert printed[0].splitlines()[-1].split()[:3] == ["ok", "kernel", "signals"]
    assert printed[1].split() == ["ok", "kernel", "second", "works"]


# The machine.


def test_a_kernel_without_pidfd_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refused)

    found = by_subject(machine_checks.kernel())

    assert (found["pidfd"].level, found["pidfd"].found) == ("fails", "Function not implemented")
    assert found["memfd, futex"].level == "ok"


def test_a_machine_without_shared_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refused)

    assert by_subject(machine_checks.kernel())["memfd, futex"].level == "fails"


def test_low_limits_and_core_files_are_noted() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
        f"resource.setrlimit(resource.RLIMIT_CORE, ({1 << 30}, {resource.RLIM_INFINITY})); "
        "from ttprun.cli.machine_checks import limits; "
        "print(*(f'{each.subject}: {each.found}, {each.cure}' for each in limits() if each.cure), sep='\\n')"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "open files: 256, ulimit -n 65536" in done.stdout.splitlines()
    assert "core files: 1.0 GiB, ulimit -c 0, unless you need them" in done.stdout.splitlines()


def test_a_directory_that_cannot_be_written_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    found = by_subject(machine_checks.files())

    assert found["this directory"].level == "note"
    assert "--run-dir" in found["this directory"].cure


def test_a_host_whose_name_is_not_known_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")

    found = by_subject(machine_checks.network())["host name"]

    assert found.level == "note"
    assert found.cure == "add '127.0.0.1 no-such-host.invalid' to /etc/hosts"


@pytest.mark.parametrize(("scope", "level"), [("1", "ok"), ("3", "note")])
def test_py_spy_that_the_kernel_refuses_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str, level: str
) -> None:
    (tmp_path / "ptrace_scope").write_text(scope + "\n")
    (tmp_path / "py-spy").touch(mode=0o755)
    monkeypatch.setattr(machine_checks, "YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    assert by_subject(machine_checks.stacks())["ptrace (yama)"].level == level


# Software and devices, from what a probe may say.


@pytest.mark.parametrize(
    ("changed", "subject", "means"),
    [
        ({"torch": "2.5.1"}, "torch", "ttprun's process group does not fit it"),
        ({"backends": []}, "backends", "ranks are repaired over gloo only"),
        ({"hooks": None}, "hooks", "ranks run unprotected"),
        ({"error": "RuntimeError: x"}, "torch", "nothing can run"),
    ],
)
def test_software_that_recovery_cannot_do_without_fails(changed: dict[str, Any], subject: str, means: str) -> None:
    before = by_subject(software(WELL))
    after = by_subject(software(WELL | changed))

    assert {finding.level for finding in before.values()} == {"ok"}
    assert after[subject].level == "fails"
    assert after[subject].means.startswith(means)


def test_a_torch_that_nobody_has_tried_is_noted() -> None:
    found = by_subject(software(WELL | {"torch": "2.99.0"}))["torch"]

    assert (found.level, found.means) == ("note", "it was not tried with this ttprun")


def test_a_repair_that_does_not_come_about_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SCRIPT", "raise ValueError('no such torch')")

    (found,) = doctor.repair("2.99.0")

    assert (found.subject, found.level) == ("repair", "fails")
    assert "no such torch" in found.found
    assert "2.99.0" in found.found


def test_a_repair_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SCRIPT", "import time; time.sleep(600)")

    (found,) = doctor.repair("2.99.0", limit_s=4.0)

    assert (found.level, "did not end within 4 s" in found.found) == ("fails", True)


def test_the_tiny_job_takes_no_port_that_another_job_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Launch] = []

    def runs(launch: Launch, folder: Path) -> Twin:
        started.append(launch)
        return Twin(folder, 1, 0.1, {}, "not run")

    monkeypatch.setattr(Launch, "run", runs)  # torch before 2.13 takes port 29500 otherwise

    list(doctor.repair("2.11.0"))

    assert "--standalone" in started[0].options


def test_a_gpu_is_reported_with_its_versions_and_what_it_says_of_itself() -> None:
    slow = GPU | {"findings": ["4 rows were remapped"]}
    found = [by_subject(accelerators(WELL | {"devices": [one]}))["cuda 0"] for one in (GPU, slow)]

    assert found[0].found == "NVIDIA H100, 80 GiB (70 free), CUDA 12.8, driver 570.1"
    assert [(one.level, one.means) for one in found] == [("ok", ""), ("note", "4 rows were remapped")]


def test_a_gpu_that_cannot_be_used_is_reported_with_the_reason() -> None:
    broken = GPU | {"is_usable": False, "findings": ["Xid 79: it has fallen off the bus"]}

    found = by_subject(accelerators(WELL | {"devices": [broken]}))["cuda 0"]

    assert (found.level, found.means) == ("note", "Xid 79: it has fallen off the bus")
    assert found.cure


def test_a_gpu_that_torch_was_not_built_for_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(software_checks, "NVIDIA", tmp_path / "version")

    for cuda, cure in ((None, "install a torch that was built for CUDA"), ("12.8", "see CUDA_VISIBLE_DEVICES")):
        found = by_subject(accelerators(WELL | {"cuda": cuda}))["NVIDIA driver"]

        assert (found.found, found.level) == ("580.65.06", "note")
        assert found.cure.startswith(cure)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        (
            "version.cfg",
            "runtime_running_version=[7.3.0:8.0.RC1]\ntoolkit_running_version=[7.3.0.1.231:8.0.RC2]\n",
            "8.0.RC2",
        ),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.5.0\n", "8.5.0"),
        ("set_env.sh", "version=1\n", None),
    ],
)
def test_canns_version_is_read_where_the_environment_says_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, version: str | None
) -> None:
    monkeypatch.setattr(software_checks, "ASCEND", tmp_path / "nothing")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)

    assert cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == version


# MindIO's variables.


def test_variables_of_mindio_that_are_set_are_reported_with_what_comes_of_them() -> None:
    found = by_subject(
        software_checks.mindio_variables(
            {
                "TTP_NORMAL_ACTION_TIME_LIMIT": "300",
                "TTP_FRAMEWORK_TYPE": "2",
                "TTP_LOG_LEVEL": "DEBUG",
                "TTP_STOP_CLEAN_BEFORE_DUMP": "",
            }
        )
    )

    assert {name: finding.level for name, finding in found.items()} == {
        "TTP_NORMAL_ACTION_TIME_LIMIT": "ok",
        "TTP_FRAMEWORK_TYPE": "note",
        "TTP_LOG_LEVEL": "note",
    }
    assert found["TTP_FRAMEWORK_TYPE"].cure == "give 0 or 1, or unset it"
    assert "run directory" in found["TTP_LOG_LEVEL"].means
