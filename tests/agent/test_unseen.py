"""Ranks that use torch and have not been heard: what the agent sees of them from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttprun.agent import unseen
from ttprun.agent.seat import Seat
from ttprun.agent.unseen import Unseen

HOLD = """
import mmap, subprocess, sys
if sys.argv[2:]:
    sys.exit(subprocess.run([sys.executable, *sys.argv[2:], sys.argv[1]]).returncode)
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("there", flush=True)
sys.stdin.read()
"""


class FakeNode:
    """One seat, of which is noted what is reported; stands for Protection, too."""

    is_python = True

    def __init__(self, seat: Seat) -> None:
        self.seats = self.here = [seat]
        self.reported: list[str] = []
        self.logged: list[str] = []

    def note_unprotected(self, seat: Seat, reason: str) -> None:
        self.reported.append(reason)

    def log(self, event: str, **fields: object) -> None:
        self.logged.append(event)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Seat]]:
    """`start(flags, *words)`: the seat of a Python that has mapped what is called like torch's library."""
    (tmp_path / "libtorch_cpu.so").write_bytes(b"x")
    (tmp_path / "hold.py").write_text(HOLD)
    started: list[subprocess.Popen[str]] = []

    def begin(*flags: str, is_in_child: bool = False) -> Seat:
        words = [str(tmp_path / "hold.py"), str(tmp_path / "libtorch_cpu.so")]
        process = subprocess.Popen(
            [sys.executable, *flags, *words, *words[: int(is_in_child)]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        handler: Any = None
        return Seat(0, 0, handler, record_fd=-1, pid=process.pid)

    yield begin
    for process in started:
        process.communicate("")


def look(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Unseen:
    """Look twice within a short time, after which everything counts as lasting."""
    monkeypatch.setattr(unseen, "EVERY_S", 0.0)
    monkeypatch.setattr(unseen, "_AFTER_S", 0.05)
    found = Unseen(node, node)  # type: ignore[arg-type]
    for _ in range(3):
        found.look()
        time.sleep(0.06)
    return found


def test_a_python_that_skips_the_hooks_is_reported_once_with_the_cure(
    start: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(start("-S"))

    look(node, monkeypatch)

    (reason,) = node.reported
    assert reason.endswith("was started with -S, which runs no sitecustomize: leave that option out")


def test_a_silent_python_may_still_be_importing_torch_until_a_rank_is_lost(
    start: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .pth file may import torch before the hooks are there."""
    node = FakeNode(start())

    found = look(node, monkeypatch)
    before = list(node.reported)
    found.settle(node.seats[0])

    assert before == []
    assert "has not loaded ttprun's hooks" in node.reported[0]


def test_training_in_a_child_is_said_and_counts_once_a_rank_is_lost(
    start: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = FakeNode(start(is_in_child=True))
    node.seats[0].is_present = True

    found = look(node, monkeypatch)
    before = list(node.reported)
    found.settle(node.seats[0])

    assert before == []
    assert node.logged == ["rank_unseen"]
    assert caplog.text.count("rank 0 may train where no fault can be repaired") == 1
    assert "its child process does" in node.reported[0]


def test_a_rank_that_has_hung_up_and_lives_is_reported(
    start: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(start())
    seat = node.seats[0]
    seat.is_present = seat.is_protected = True
    seat.hung_up_at_s = time.monotonic()

    look(node, monkeypatch)

    assert "replaced itself by another program (exec)" in node.reported[0]


def test_a_rank_that_is_heard_is_not_looked_at(start: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(start("-S"))
    node.seats[0].is_present = node.seats[0].is_protected = True

    look(node, monkeypatch).settle(node.seats[0])

    assert (node.reported, node.logged) == ([], [])
