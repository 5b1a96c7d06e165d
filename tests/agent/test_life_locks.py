"""The first sign of a process's end comes before its memory is given back, and is never taken for more than it is."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ttprun.agent.base import life_signs
from ttprun.agent.base.life_signs import Causes
from ttprun.protocol.board import Board
from ttprun.tensors.memory import own_cgroup

LIMIT_S = 60.0
PROGRAM = """\
import os, signal, sys, threading, time
from ttprun.protocol.board import Board
from ttprun.rank import heartbeat as life
life.hold(Board({board_fd}, 2), 1)
{memory}
print("there", flush=True)
sys.stdin.readline()
{what}
"""
WAIT = "time.sleep(60)"
BIG = "memory = b'x' * (1 << 30)"


@dataclass
class Watched:
    """A process that holds the lock and waits for a line, and what is reported of it."""

    process: subprocess.Popen[str]
    reported: queue.Queue[tuple[float, int]] = field(default_factory=queue.Queue)

    def go_on(self) -> None:
        """Let it come to `what`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def start() -> Iterator[Callable[..., Watched]]:
    """`start(what, memory="")`: a process that does `what` once it is ordered to go on."""
    started: list[Watched] = []
    board_fd, board = Board.create(2)

    def start_process(what: str, memory: str = "") -> Watched:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(board_fd=board_fd, what=what, memory=memory)],
            pass_fds=(board_fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        watched = Watched(process)
        started.append(watched)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        life_signs.watch(board, 1, process.pid, lambda code: watched.reported.put((time.monotonic(), code)))
        return watched

    yield start_process
    for watched in started:
        watched.process.kill()
        watched.process.communicate()
    os.close(board_fd)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("os._exit(3)", 3),
        ("raise ValueError", 1),
        ("threading.Thread(target=os._exit, args=(4,)).start(); time.sleep(60)", 4),
        ("pass", 0),
    ],
)
def test_how_a_process_ends_is_reported_as_its_parent_will_hear(
    start: Callable[..., Watched], what: str, code: int
) -> None:
    watched = start("sys.stderr = open(os.devnull, 'w')\n" + what)

    watched.go_on()

    assert watched.reported.get(timeout=LIMIT_S)[1] == code
    assert watched.process.wait(LIMIT_S) == code


def test_an_end_is_reported_before_a_big_memory_is_given_back(start: Callable[..., Watched]) -> None:
    """Of several, since on a busy machine the thread that reports may be late."""
    assert any(is_reported_early(start(WAIT, BIG)) for _ in range(8))


def is_reported_early(watched: Watched) -> bool:
    pidfd = os.pidfd_open(watched.process.pid)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)

    watched.process.kill()
    assert ended.poll(LIMIT_S * 1000)
    gone_s = time.monotonic()
    os.close(pidfd)

    reported_s, code = watched.reported.get(timeout=LIMIT_S)
    assert code == -signal.SIGKILL
    return reported_s < gone_s


@pytest.mark.parametrize(
    "what",
    [
        "os.execv(sys.executable, [sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(60)'])",
        "pid = os.fork()\nif not pid: os._exit(5)\nos.waitpid(pid, 0); print(1, flush=True)\ntime.sleep(60)",
    ],
    ids=["it executes another program", "a forked child ends"],
)
def test_a_process_that_lives_on_is_not_said_to_end(start: Callable[..., Watched], what: str) -> None:
    watched = start(what)

    watched.go_on()

    assert watched.process.stdout is not None
    assert watched.process.stdout.readline() == "1\n"
    with pytest.raises(queue.Empty):
        watched.reported.get(timeout=0.5)
    watched.process.kill()
    assert watched.process.wait(LIMIT_S) == -signal.SIGKILL


def test_a_process_without_the_lock_is_left_to_its_pidfd() -> None:
    fd, board = Board.create(1)
    reported: queue.Queue[int] = queue.Queue()
    process = subprocess.Popen(["sleep", "60"])

    life_signs.watch(board, 0, process.pid, reported.put)
    process.kill()
    process.wait()

    with pytest.raises(queue.Empty):
        reported.get(timeout=0.3)
    os.close(fd)


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
