"""A job that dies at any point of a commit leaves the old or the new checkpoint whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.state.making import DESCRIPTION, locked, names, run_program, take
from ttprun.state.checkpoint import verify
from ttprun.state.store import COMMIT_POINTS, CheckpointStore

COMMIT_AND_DIE = """
import os, signal, sys
from tests.state.making import take
from ttprun.state.store import CheckpointStore

def at(point):
    if point == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

store = CheckpointStore(sys.argv[1], keep=1, at=at)
store.lock("r2")
take(store, int(sys.argv[3]), b"new")
"""
WRITE_AND_DIE = """
import os, signal, sys
from ttprun.state.store import CheckpointStore

def chunks():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)

store = CheckpointStore(sys.argv[1])
store.lock("r2")
store.begin(120).add("tensors-00000.safetensors", chunks())
"""
TENSORS = "tensors-00000.safetensors"


def test_a_commit_passes_every_point_once_and_in_order(tmp_path: Path) -> None:
    first = locked(tmp_path)
    take(first, 100)
    first.unlock()
    passed: list[str] = []
    store = CheckpointStore(tmp_path, keep=1, at=passed.append)
    store.lock("r2")

    take(store, 120)

    assert tuple(passed) == COMMIT_POINTS


@pytest.mark.parametrize("boundary", [120, 100], ids=["newer", "again"])
@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_killed_at_any_point_the_old_or_the_new_checkpoint_is_valid(tmp_path: Path, point: str, boundary: int) -> None:
    first = locked(tmp_path)
    take(first, 100, b"old")
    first.unlock()

    died = run_program(COMMIT_AND_DIE, tmp_path, point, boundary)
    chosen, skipped = CheckpointStore(tmp_path).newest_valid()
    next_job = locked(tmp_path, "r3", keep=1)
    chosen_by_next_job, _ = next_job.newest_valid()

    assert died.returncode == -signal.SIGKILL, died.stderr
    assert skipped == []
    assert chosen is not None
    is_new = COMMIT_POINTS.index(point) >= COMMIT_POINTS.index("renamed")
    assert chosen.file(TENSORS).read_bytes() == (b"new" if is_new else b"old")
    assert verify(chosen).is_valid
    assert chosen_by_next_job == chosen
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    taken = take(next_job, 130)
    assert names(tmp_path) == {taken.name, "latest"}


def test_killed_in_the_middle_of_a_file_the_old_checkpoint_is_valid_and_the_rest_is_removed(tmp_path: Path) -> None:
    first = locked(tmp_path)
    old = take(first, 100)
    first.unlock()

    died = run_program(WRITE_AND_DIE, tmp_path)
    left = names(tmp_path)
    chosen, skipped = locked(tmp_path, "r3").newest_valid()

    assert died.returncode == -signal.SIGKILL, died.stderr
    assert left == {"step-00000100", "latest", ".writing-step-00000120-r2"}
    assert (chosen, skipped) == (old, [])
    assert names(tmp_path) == {"step-00000100", "latest"}


def test_all_is_on_the_disk_before_the_name_is_and_the_name_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []
    fsync = os.fsync

    def told_fsync(fd: int) -> None:
        story.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    store = CheckpointStore(tmp_path / "save", keep=1, at=story.append)
    store.lock("r1")
    take(store, 100)
    draft = store.begin(120)
    draft.path(TENSORS).write_bytes(b"by another process")
    monkeypatch.setattr(os, "fsync", told_fsync)
    story.clear()
    draft.commit(DESCRIPTION)

    assert story == [
        f"fsync {TENSORS}",
        "files synced",
        "fsync ttprun.json",
        "manifest written",
        "fsync .writing-step-00000120-r1",
        "directory synced",
        "fsync .writing-latest",
        "pointer written",
        "renamed",
        "fsync save",
        "name synced",
        "fsync save",
        "pointer replaced",
        "old one set aside",
        "old one removed",
    ]
