"""Processes that have torch and no hook of ours, as /proc shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttprun.rank.bootstrap import unhooked

HOLD = """
import mmap, socket, sys
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
connection = socket.create_server(("127.0.0.1", 0)) if sys.argv[2:] else None
print("there", flush=True)
sys.stdin.read()
"""
START = "import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:]])\n"


@pytest.fixture
def library(tmp_path: Path) -> str:
    """A file with the name of torch's library."""
    path = tmp_path / "libtorch_cpu.so"
    path.write_bytes(b"x")
    return str(path)


@pytest.fixture
def child(tmp_path: Path, library: str, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that has it mapped in a child of a child, which is connected unless the test says "alone"."""
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "start.py").write_text(START)
    words = [str(tmp_path / "start.py"), str(tmp_path / "hold.py"), library]
    if getattr(request, "param", "") != "alone":
        words.append("connected")
    with subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
        process.communicate("")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["python", "-u", "script.py", "-E"], ""),
        (["python", "-E", "-u", "script.py"], "-E"),
        (["python", "-uI", "script.py"], "-I"),
        (["python", "-u", "-S", "script.py"], "-S"),
        (["python", "-WE", "-XS", "script.py"], ""),
        (["python", "-m", "train", "-S"], ""),
        (["python"], ""),
        ([], ""),
    ],
)
def test_the_option_by_which_python_skips_our_hooks_is_named(words: list[str], option: str) -> None:
    assert option in unhooked.why_skipped(words).text
    assert bool(unhooked.why_skipped(words)) is bool(option)


def test_training_in_a_child_of_a_rank_is_found_and_named(child: subprocess.Popen[str], library: str) -> None:
    why = unhooked.why_in_child(child.pid).text

    assert "are not hooked" in why
    assert not unhooked.has_torch(child.pid)
    (trains,) = filter(unhooked.has_torch, unhooked.descendants(child.pid))
    assert f"pid {trains}: " in why
    assert unhooked.is_below(trains, os.getpid())
    assert not unhooked.is_below(os.getpid(), trains)


@pytest.mark.parametrize("child", ["alone"], indirect=True)
def test_a_child_that_has_only_imported_torch_does_not_train(child: subprocess.Popen[str]) -> None:
    """However long it takes: a launcher may ask a child which devices there are, on a busy machine."""
    assert any(map(unhooked.has_torch, unhooked.descendants(child.pid)))
    assert not unhooked.why_in_child(child.pid)


def test_a_process_that_has_computed_for_longer_than_an_import_trains(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "hold.py"), library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        before = unhooked.seems_to_train(process.pid)
        monkeypatch.setattr(unhooked, "IMPORT_CPU_S", -1.0)  # its CPU time is counted in ticks: it may be 0
        after = unhooked.seems_to_train(process.pid)
        process.communicate("")

    assert (before, after) == (False, True)


def test_a_process_that_is_gone_trains_nowhere() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    assert (unhooked.why_in_child(process.pid).text, unhooked.words_of(process.pid)) == ("", [])
    assert not unhooked.is_below(process.pid, os.getpid())
