"""Why a process has ended: what the control group, the kernel's log and the signal say."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ttprun.agent.base.life_signs import Causes
from ttprun.tensors.memory import own_cgroup

EVENTS = "low 0\nhigh 3\nmax 12\noom 1\noom_kill {kills}\noom_group_kill 0\n"
KERNEL = "6,1,2,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB\n"


def write_events(folder: Path, kills: int, name: str = "memory.events") -> None:
    folder.joinpath(name).write_text(EVENTS.format(kills=kills))


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"], ids=["version 2", "version 1"])
def test_a_kill_for_memory_is_known_from_the_control_groups_events(tmp_path: Path, name: str) -> None:
    write_events(tmp_path, 2, name)
    causes = Causes(tmp_path, tmp_path / "none")
    write_events(tmp_path, 3, name)

    first, second = causes.of_signal(signal.SIGKILL, 1), causes.of_signal(signal.SIGKILL, 2)

    assert first == "out of memory (cgroup limit)"
    assert second == ""


def test_a_kill_for_memory_of_the_whole_machine_is_known_from_the_kernels_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(KERNEL)
    causes = Causes(tmp_path, log)

    assert causes.of_signal(signal.SIGKILL, 4711) == "out of memory (the kernel's log says so)"
    assert causes.of_signal(signal.SIGKILL, 471) == ""


def test_where_nothing_can_be_read_nothing_is_claimed(tmp_path: Path) -> None:
    causes = Causes(tmp_path / "none", tmp_path / "none")

    assert causes.of_signal(signal.SIGKILL, 1) == ""


@pytest.mark.parametrize(
    ("number", "reported"),
    [
        (signal.SIGSEGV, "SIGSEGV, crashed in native code"),
        (signal.SIGABRT, "SIGABRT, aborted by native code"),
        (signal.SIGTERM, "SIGTERM, sent from outside this job"),
        (signal.SIGHUP, "SIGHUP"),
        (250, ""),
    ],
)
def test_a_signal_is_named(tmp_path: Path, number: int, reported: str) -> None:
    assert Causes(tmp_path, tmp_path / "none").of_signal(number, 1) == reported


def test_a_process_finds_its_own_control_group(tmp_path: Path) -> None:
    listing = tmp_path / "cgroup"
    listing.write_text("0::/no/such/group\n")

    assert own_cgroup(listing) == Path("/sys/fs/cgroup")
    assert own_cgroup(tmp_path / "none") is None
