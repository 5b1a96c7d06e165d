"""One job writes to a save directory at a time; the next one tidies up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.state.making import DESCRIPTION, locked, names, take
from ttprun.state.files import CannotWriteError, SaveDirectoryInUseError
from ttprun.state.store import LOCK_NAME, CheckpointStore, read_latest

HOLD = """
import sys
from ttprun.state.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.lock("day", "/runs/day")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_job_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"

        with pytest.raises(SaveDirectoryInUseError) as refused:
            CheckpointStore(tmp_path).lock("night")

        holder.kill()

    host = os.uname().nodename
    assert str(refused.value) == (
        f"run 'day' (pid {holder.pid} on {host}) writes to '{tmp_path}'; wait until it has ended, or name another "
        "with --save-dir"
    )
    assert (refused.value.run_id, refused.value.pid, refused.value.host) == ("day", holder.pid, host)
    next_store = CheckpointStore(tmp_path)
    next_store.lock("night")
    assert next_store.killed == ("day", "/runs/day")


def test_a_holder_that_has_not_written_its_name_yet_is_refused_all_the_same(tmp_path: Path) -> None:
    held = locked(tmp_path, "day")
    os.truncate(tmp_path / LOCK_NAME, 0)

    with pytest.raises(SaveDirectoryInUseError, match=r"^another job writes to"):
        CheckpointStore(tmp_path).lock("night")

    held.unlock()


def test_a_lock_that_was_given_back_can_be_taken_and_leaves_no_name(tmp_path: Path) -> None:
    locked(tmp_path, "day").unlock()

    assert (tmp_path / LOCK_NAME).read_bytes() == b""
    assert locked(tmp_path, "night").killed == ("", "")


def test_looking_needs_no_lock_but_writing_does(tmp_path: Path) -> None:
    given_up, other = locked(tmp_path), CheckpointStore(tmp_path)
    taken, draft = take(given_up, 10), given_up.begin(11)

    assert other.checkpoints() == [taken]
    with pytest.raises(RuntimeError, match="without the lock"):
        other.begin(20)
    given_up.unlock()
    with pytest.raises(CannotWriteError, match="has given the directory back"):
        draft.commit(DESCRIPTION)
    assert other.checkpoints() == [taken]


def test_what_a_dead_job_left_half_done_is_removed_and_nothing_else(tmp_path: Path) -> None:
    leftovers = (".writing-step-00000120-day", ".writing-incomplete-step-00000120-day", ".removing-step-00000090-2")
    others = {".writing-novel", "writing-step-00000120", ".cache"}
    for name in (*leftovers, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / ".writing-latest").write_text("step-00000120\n")

    locked(tmp_path)

    assert names(tmp_path) == others


def test_a_draft_that_was_given_up_makes_room_for_the_next_of_its_boundary(tmp_path: Path) -> None:
    store = locked(tmp_path)
    store.begin(10).add("rank-00001.msgpack", b"of a rank that was lost later")

    taken = take(store, 10)

    assert not taken.file("rank-00001.msgpack").exists()
    assert names(tmp_path) == {"step-00000010", "latest"}


def test_a_launcher_that_was_cut_off_and_comes_back_changes_nothing_that_the_next_one_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda fd, how: None)  # the server has given its lock to another host
    cut_off, following = locked(tmp_path), locked(tmp_path)
    draft = cut_off.begin(40)
    take(following, 60)

    for attempt in (lambda: draft.commit(DESCRIPTION), lambda: take(cut_off, 41)):
        with pytest.raises(CannotWriteError, match="another launcher has written step-00000060 since"):
            attempt()

    assert read_latest(tmp_path) == "step-00000060"
    assert names(tmp_path) == {"step-00000060", "latest"}
    assert take(following, 70).is_valid
