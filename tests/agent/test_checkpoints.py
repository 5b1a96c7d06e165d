"""What the agent does while a checkpoint is written: nothing that the disk does may hold up or end the job."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.checkpoints import Checkpoints
from ttprun.agent.snapshots import Shelf
from ttprun.state.draft import Draft
from ttprun.state.store import CheckpointStore

LIMIT_S = 10.0


class FakeSupervisor:
    """What Checkpoints needs of a supervisor: one rank, to which things are told, and a clear end."""

    def __init__(self, persist_timeout_s: float) -> None:
        self.config = SimpleNamespace(run_id="r1", persist_timeout_s=persist_timeout_s)
        start = {"args": ("-u", "train.py")}
        self.told: list[Any] = []
        self.seats = [SimpleNamespace(rank=0, tell=self.told.append, handler=SimpleNamespace(start=start))]
        self.called: list[Callable[[], None]] = []
        self.call = self.called.append

    def log(self, event: str, **fields: Any) -> None:
        pass


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """A snapshot of one rank that holds nothing."""
    told = {"share": 0, "header": [], "model": {}, "bytes": 0, "records_bytes": 0}
    made = Shelf([os.memfd_create("records")], [os.memfd_create("share")], boundary=20, told={0: told})
    yield made
    made.close()


def written(checkpoints: Checkpoints, supervisor: FakeSupervisor, shelf: Shelf) -> None:
    """A snapshot is put on the disk, or given up."""
    checkpoints.write_snapshot(shelf, lambda: None)
    checkpoints.end(is_done=False)
    supervisor.called.pop()()


def test_a_checkpoint_holds_of_a_snapshot_what_the_ranks_have_written_and_nothing_behind_it(
    tmp_path: Path, shelf: Shelf
) -> None:
    supervisor = FakeSupervisor(LIMIT_S)
    store = CheckpointStore(tmp_path, 3)
    for fd, name in ((shelf.records[0], "records_bytes"), (shelf.shares[0], "bytes")):
        os.pwrite(fd, b"told" + bytes(100), 0)
        shelf.told[0][name] = 4

    written(Checkpoints(supervisor, store), supervisor, shelf)  # type: ignore[arg-type]

    (checkpoint,) = store.checkpoints()
    assert checkpoint.file("tensors-00000.safetensors").read_bytes() == b"told"
    assert checkpoint.file("rank-00000.msgpack").read_bytes() == b"told"


def test_a_snapshot_that_is_shorter_than_what_the_ranks_have_written_becomes_no_checkpoint(
    tmp_path: Path, shelf: Shelf
) -> None:
    supervisor = FakeSupervisor(LIMIT_S)
    store = CheckpointStore(tmp_path, 3)
    checkpoints = Checkpoints(supervisor, store)  # type: ignore[arg-type]
    shelf.told[0]["bytes"] = 4

    written(checkpoints, supervisor, shelf)

    assert store.checkpoints() == []
    assert checkpoints.status is not None
    assert "4 bytes of a snapshot are not there" in checkpoints.status.reason


def test_to_look_how_far_a_checkpoint_is_does_no_harm_when_it_has_just_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ttprun.observe.progress.SILENT_S", 0.0)
    monkeypatch.setattr("ttprun.observe.progress._LOG_S", 0.0)
    supervisor = FakeSupervisor(LIMIT_S)
    checkpoints = Checkpoints(supervisor, CheckpointStore(tmp_path, 3))  # type: ignore[arg-type]
    checkpoints.persist(recovery.Persist(generation=1, boundary=20, ranks=(0,), cause="signal"))
    folder = Path(supervisor.told[0]["path"]).parent

    (folder / "part").write_bytes(b"x" * 1000)
    checkpoints.look()
    shutil.rmtree(folder)
    checkpoints.look()

    assert [record.message for record in caplog.records] == ["writing a checkpoint: 1.0 kB in 0 s"]
    checkpoints.end(is_done=False)


def test_a_disk_that_does_not_answer_keeps_the_launcher_from_its_end_for_persist_timeout_only(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_writing, answers = threading.Event(), threading.Event()

    def commit(draft: Draft, description: Any) -> Any:
        is_writing.set()
        assert answers.wait(LIMIT_S)
        raise AssertionError("too late")

    monkeypatch.setattr(Draft, "commit", commit)
    checkpoints = Checkpoints(FakeSupervisor(0.1), CheckpointStore(tmp_path, 3))  # type: ignore[arg-type]
    checkpoints.write_snapshot(shelf, lambda: None)
    assert is_writing.wait(LIMIT_S)

    with caplog.at_level(logging.WARNING):
        checkpoints.end(is_done=False)

    assert [record.message for record in caplog.records] == [
        "a checkpoint is still being written after 0 s (persist_timeout_s): given up"
    ]
    answers.set()
