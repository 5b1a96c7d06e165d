"""The system fails in mid-run (memory, files, disk): one line says so, and a lost rank is replaced all the same."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Launch, Run, assert_no_orphans, assert_same_outcome
from ttprun.state.store import CheckpointStore

GATED = "gated_steps.py"  # all wait before step 12
# A launcher whose /dev/shm is its own, and full.
NO_SHARED_MEMORY = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 65536 /dev/zero >/dev/shm/filling && exec "$@"',
    "sh",
)
StartTtprun = Callable[..., Launch]
Undisturbed = Callable[..., Run]


@pytest.fixture
def run_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB where the first launch has its run directory."""
    yield from disk_at(tmp_path / "0" / "run")


@pytest.fixture
def save_disk(tmp_path: Path) -> Iterator[Path]:
    """One for checkpoints."""
    yield from disk_at(tmp_path / "save")


def disk_at(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    mount(folder, "size=1m,mode=700")
    yield folder
    while folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


def mount(folder: Path, options: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user cannot mount a file system")


def spoil(disk: Path, what: str) -> None:
    """From now on nothing can be written there."""
    match what:
        case "full":
            (disk / "filling").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        case _:
            mount(disk, "ro")


def may_unshare() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run(["unshare", "--mount", "true"], check=False).returncode


def at_step_12(start_ttprun: StartTtprun, tmp_path: Path, **how: Any) -> tuple[Launch, list[int]]:
    """A job of two ranks that waits; and the ranks' pids."""
    launch = start_ttprun(GATED, 2, script_args=["--gate", str(tmp_path / "gate")], **how)
    launch.wait_for_line(0, "step 11 ")
    assert launch.run_dir is not None
    with open(launch.run_dir / "events.jsonl", encoding="utf-8") as log:
        events = [json.loads(line) for line in log]
    return launch, [event["pid"] for event in events if event["event"] == "rank_started"]


def use_up_files(pid: int) -> None:
    """Let a process open no other file: as many are allowed as it has."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(fd for fd in range(len(used) + 1) if fd not in used)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))


def killed(launch: Launch, pid: int, tmp_path: Path) -> Run:
    """The run at its end, after this rank is killed and the others may go on."""
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "gate").touch()
    run = launch.finish()
    assert_no_orphans(run)
    assert "was killed (SIGKILL) in step 12: recovered" in run.output, run.story()
    assert "0 steps lost" in run.output, run.story()
    assert "Traceback" not in run.output, run.story()
    return run


def test_a_rank_is_replaced_by_a_launcher_that_can_open_no_other_file(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    launch, (_, lost) = at_step_12(start_ttprun, tmp_path)

    use_up_files(launch.process.pid)
    run = killed(launch, lost, tmp_path)

    assert_same_outcome(run, undisturbed(GATED, 2))
    assert run.output.count("the launcher has nearly as many open files as it may have") == 1, run.story()


@pytest.mark.skipif(not may_unshare(), reason="NOT TESTED: a full /dev/shm (unshare --mount)")
def test_a_rank_is_replaced_when_the_shared_memory_is_full(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    launch, (_, lost) = at_step_12(start_ttprun, tmp_path, within=NO_SHARED_MEMORY)

    assert_same_outcome(killed(launch, lost, tmp_path), undisturbed(GATED, 2))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("full", "No space left on device"),
    ],
)
def test_a_rank_is_replaced_though_the_run_directory_cannot_be_written_any_more(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path, run_disk: Path, what: str, reason: str
) -> None:
    launch, (_, lost) = at_step_12(start_ttprun, tmp_path)

    spoil(run_disk, what)
    run = killed(launch, lost, tmp_path)

    assert_same_outcome(run, undisturbed(GATED, 2))
    assert run.output.count(f"({reason}); the job continues") >= 1, run.story()


@pytest.mark.parametrize(("what", "reason"), [("full", "the disk is full"), ("read-only", "is read-only")])
def test_a_preempted_job_whose_save_directory_cannot_be_written_says_why_and_leaves_nothing_half_done(
    start_ttprun: StartTtprun, tmp_path: Path, save_disk: Path, what: str, reason: str
) -> None:
    launch, _ = at_step_12(start_ttprun, tmp_path, options=["--save-dir", str(save_disk)])

    spoil(save_disk, what)
    launch.process.send_signal(signal.SIGTERM)
    (tmp_path / "gate").touch()
    run = launch.finish()

    assert run.exit_code == 143, run.story()
    assert reason in run.output, run.story()
    assert "Traceback" not in run.output, run.story()
    assert CheckpointStore(save_disk).checkpoints() == []


@pytest.mark.skipif(not shutil.which("cc"), reason="NOT TESTED: a clock that jumps (no C compiler)")
@pytest.mark.parametrize("jump_s", [-3600])
def test_a_rank_is_replaced_though_the_wall_clock_has_jumped_by_an_hour(
    start_ttprun: StartTtprun,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jump_s: int,
) -> None:
    expected = undisturbed(GATED, 2)
    library, jump_if = tmp_path / "jumping_clock.so", tmp_path / "jump"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("jumping_clock.c")], check=True)
    for name, value in {"LD_PRELOAD": library, "JUMP_IF": jump_if, "JUMP_S": jump_s}.items():
        monkeypatch.setenv(name, str(value))
    launch, (_, lost) = at_step_12(start_ttprun, tmp_path)

    jump_if.touch()
    run = killed(launch, lost, tmp_path)

    assert_same_outcome(run, expected)
    (incident,) = run.incidents
    assert 0 < incident["total_s"] < 60, run.story()
    first, last = (datetime.fromisoformat(event["at"]) for event in (run.events[0], run.events[-1]))
    assert abs((last - first).total_seconds() - jump_s) < 300, run.story()  # the jump was seen
