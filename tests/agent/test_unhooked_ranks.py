"""Ranks that use torch and have not been heard: what the agent sees of them from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ttprun.agent.node import process_watch as unhooked_ranks
from ttprun.agent.node.node import Process
from ttprun.agent.node.process_watch import UnhookedRanks
from ttprun.agent.node.rank_processes import SHIM, StandbyHandler
from ttprun.protocol.board import Board, Field
from ttprun.protocol.node_messages import Said

HOLD = """
import mmap, os, socket, subprocess, sys
library, way = sys.argv[1:3]
if way == "in a child":
    sys.exit(subprocess.run([sys.executable, sys.argv[0], library, "connected"]).returncode)
with open(library, "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
connection = socket.create_server(("127.0.0.1", 0)) if way == "connected" else None
print("there", flush=True)
if sys.stdin.readline():
    os.execv(sys.executable, [sys.executable, *sys.argv])
"""


class FakeNode:
    """One slot, of which is noted what is reported."""

    is_python = True
    is_running = True

    def __init__(self, slot: Process) -> None:
        self.slots = self.here = [slot]
        self.board = Board.create(1)[1]
        self.reported: list[str] = []
        self.logged: list[str] = []

    def report(self, said: Said) -> None:
        assert said.pid == self.slots[0].pid
        self.reported.append(said.message.reason.text)

    def log(self, event: str, **fields: object) -> None:
        self.logged.append(event)


@dataclass
class Started:
    """A process and its slot."""

    slot: Process
    process: subprocess.Popen[str]

    def wait_until_there(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "there\n"

    def execute_again(self) -> None:
        """It replaces itself by the same program."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.wait_until_there()


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*flags, way)`: the slot of a Python that has mapped what is called like torch's library."""
    (tmp_path / "libtorch_cpu.so").write_bytes(b"x")
    (tmp_path / "hold.py").write_text(HOLD)
    began: list[Started] = []

    def begin(*flags: str, way: str = "alone", path: str = SHIM) -> Started:
        words = [*flags, str(tmp_path / "hold.py"), str(tmp_path / "libtorch_cpu.so"), way]
        process = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        handler: Any = None
        began.append(Started(Process(0, 0, handler, record_fd=-1, pid=process.pid), process))
        began[-1].wait_until_there()
        return began[-1]

    yield begin
    for started in began:
        started.process.communicate("")


def look(started: Started, monkeypatch: pytest.MonkeyPatch) -> tuple[UnhookedRanks, FakeNode]:
    """Look several times."""
    monkeypatch.setattr(unhooked_ranks, "EVERY_S", 0.0)
    node = FakeNode(started.slot)
    found = UnhookedRanks(node)  # type: ignore[arg-type]
    if started.slot.is_present:
        found.note_present(started.slot)
    for _ in range(3):
        found.look()
    return found, node


def test_a_python_that_skips_the_hooks_is_reported_once_with_the_cure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, node = look(start("-S"), monkeypatch)

    (reason,) = node.reported
    assert reason.endswith("was started with -S, which runs no sitecustomize: leave that option out")


@pytest.mark.parametrize(("path", "way"), [("/elsewhere", "alone"), (SHIM, "connected")])
def test_a_python_whose_path_leaves_the_hooks_out_or_that_has_connected_without_them_is_reported(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, way: str
) -> None:
    _, node = look(start(path=path, way=way), monkeypatch)

    (reason,) = node.reported
    assert "has not loaded ttprun's hooks" in reason


@pytest.mark.parametrize(
    ("how", "differing"),
    [
        ({}, {}),  # a .pth file may import torch before the hooks are there
        ({"path": "/elsewhere", "way": "connected"}, {"handler": object.__new__(StandbyHandler)}),
        ({"way": "connected"}, {"had_torch": True}),
    ],
    ids=["it may still import torch", "ttprun has forked it itself", "in the place of one that was heard"],
)
def test_a_silent_process_is_no_suspect(
    start: Start, monkeypatch: pytest.MonkeyPatch, how: dict[str, str], differing: dict[str, Any]
) -> None:
    started = start(**how)
    for name, value in differing.items():
        setattr(started.slot, name, value)

    found, node = look(started, monkeypatch)
    found.settle()

    assert node.reported == []


def test_training_in_a_child_is_said_and_counts_once_a_rank_is_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = start(way="in a child")
    started.slot.is_present = True

    found, node = look(started, monkeypatch)
    before = list(node.reported)
    found.settle()

    assert before == []
    assert node.logged == ["rank_unseen"]
    assert caplog.text.count("rank 0 may train where no fault can be repaired") == 1
    assert "its child process does" in node.reported[0]


def test_a_rank_that_has_hung_up_and_has_replaced_itself_is_reported(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start()
    started.slot.is_present = started.slot.is_protected = True
    found, node = look(started, monkeypatch)
    started.slot.hung_up_at_s = time.monotonic()

    found.look()
    before = list(node.reported)
    started.execute_again()
    found.look()

    assert before == []  # it may be about to end
    assert "replaced itself by another program (exec)" in node.reported[0]


def test_a_rank_that_has_hung_up_and_trains_on_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    started = start()
    started.slot.is_present = started.slot.is_protected = True
    found, node = look(started, monkeypatch)
    started.slot.hung_up_at_s = time.monotonic()

    node.board.set(0, Field.SEEN_NS, time.monotonic_ns())
    found.look()

    assert "closed all of its file descriptors" in node.reported[0]


def test_a_rank_that_is_heard_is_not_looked_at(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    started = start("-S")
    started.slot.is_present = started.slot.is_protected = True

    found, node = look(started, monkeypatch)
    found.settle()

    assert (node.reported, node.logged) == ([], [])


@pytest.mark.parametrize(("steps", "words"), [(0, "nothing is saved, not even at a signal"), (1, "")])
def test_a_script_without_an_optimizer_is_told_once_that_nothing_is_saved(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, steps: int, words: str
) -> None:
    started = start()
    found, node = look(started, monkeypatch)
    node.board.set(0, Field.APPLIED, steps)
    found.note_present(started.slot)
    monkeypatch.setattr(unhooked_ranks, "NO_STEP_S", 0.0)

    found.look()
    found.look()

    assert [words in record.getMessage() for record in caplog.records] == [True] * bool(words)
