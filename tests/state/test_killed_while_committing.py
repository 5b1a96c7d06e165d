"""A job that dies at any system call of a commit leaves the old or the new checkpoint whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.state.making import DESCRIPTION, locked, names, newest_valid, run_program, take, why_invalid
from tests.system_calls import killed_at_each_change, why_not_traced
from ttprun.state.checkpoint import verify
from ttprun.state.store import COMMIT_POINTS, CheckpointStore

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


@pytest.mark.skipif(bool(why_not_traced()), reason=why_not_traced())
@pytest.mark.parametrize("boundary", [120, 100], ids=["newer", "again"])
def test_killed_at_any_system_call_of_a_commit_the_old_or_the_new_checkpoint_is_valid(
    tmp_path: Path, boundary: int
) -> None:
    def prepare(place: Path) -> None:
        first = locked(place)
        take(first, 100, b"old")
        first.unlock()

    found = []
    for place in killed_at_each_change(tmp_path, prepare, lambda place: take(locked(place, "r2", 1), boundary, b"new")):
        chosen = newest_valid(CheckpointStore(place))
        assert why_invalid(CheckpointStore(place)) == {}, place
        next_job = locked(place, "r3", keep=1)
        assert chosen is not None, place
        assert newest_valid(next_job) == chosen, place
        assert verify(chosen).is_valid, place
        found.append(chosen.file(TENSORS).read_bytes())
        taken = take(next_job, 130)
        assert names(place) == {taken.name, "latest"}, place

    became_new = found.index(b"new")
    assert found == [b"old"] * became_new + [b"new"] * (len(found) - became_new)
    assert 10 < became_new < len(found) - 4


def test_killed_in_the_middle_of_a_file_the_old_checkpoint_is_valid_and_the_rest_is_removed(tmp_path: Path) -> None:
    first = locked(tmp_path)
    old = take(first, 100)
    first.unlock()

    died = run_program(WRITE_AND_DIE, tmp_path)
    left = names(tmp_path)
    next_job = locked(tmp_path, "r3")

    assert died.returncode == -signal.SIGKILL, died.stderr
    assert left == {"step-00000100", "latest", ".writing-step-00000120-r2"}
    assert (newest_valid(next_job), why_invalid(next_job)) == (old, {})
    assert names(tmp_path) == {"step-00000100", "latest"}


def test_all_is_on_the_disk_before_the_name_is_and_the_name_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []
    fsync = os.fsync

    def reported_fsync(fd: int) -> None:
        story.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    store = CheckpointStore(tmp_path / "save", keep=1, at=story.append)
    store.lock("r1")
    take(store, 100)
    draft = store.begin(120)
    draft.path(TENSORS).write_bytes(b"by another process")
    monkeypatch.setattr(os, "fsync", reported_fsync)
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
