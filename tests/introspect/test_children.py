"""What a killed DataLoader worker leaves in shared memory is removed: its own alone."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttprun.introspect import children


@pytest.fixture
def dead() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_by(folder: Path, pid: int, number: int = 0) -> Path:
    path = folder / f"torch_{pid}_77_{number}"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    return path


def test_what_a_dead_worker_of_this_run_has_left_is_removed(tmp_path: Path, dead: int) -> None:
    (tmp_path / children.NAME).write_text(f"{dead}\n")
    left = left_by(tmp_path, dead)

    removed, is_more = children.remove_left_files(tmp_path, set(), tmp_path)

    assert removed == [left.name]
    assert not left.exists()
    assert not is_more


def test_what_a_dead_rank_has_left_is_removed_too(tmp_path: Path, dead: int) -> None:
    left = left_by(tmp_path, dead)

    assert children.remove_left_files(tmp_path, {dead}, tmp_path) == ([left.name], False)


def test_files_of_others_and_of_the_living_stay(tmp_path: Path, dead: int) -> None:
    (tmp_path / children.NAME).write_text(f"{os.getpid()}\n")
    others, own = left_by(tmp_path, dead), left_by(tmp_path, os.getpid())
    named_otherwise = tmp_path / f"torch_{dead}_sem"
    named_otherwise.touch()

    assert children.remove_left_files(tmp_path, {dead + 1}, tmp_path) == ([], True)
    assert others.exists()
    assert own.exists()
    assert named_otherwise.exists()


def test_a_file_that_somebody_has_mapped_stays(tmp_path: Path, dead: int) -> None:
    left = left_by(tmp_path, dead)

    with open(left, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert children.remove_left_files(tmp_path, {dead}, tmp_path) == ([], False)
    assert left.exists()


def test_a_forked_child_notes_itself(tmp_path: Path, dead: int) -> None:
    pid = os.fork()
    if pid == 0:
        children.note(str(tmp_path))
        os._exit(0)
    os.waitpid(pid, 0)

    left = left_by(tmp_path, pid)
    assert children.remove_left_files(tmp_path, set(), tmp_path) == ([left.name], False)
