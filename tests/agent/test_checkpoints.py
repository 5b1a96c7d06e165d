"""What the agent does while a checkpoint is written: nothing that the disk does may hold up or end the job."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.lead.checkpoints import Checkpoints, SnapshotBuffer
from ttprun.agent.lead.resume import ENDED_NAME
from ttprun.agent.lead.writer import CheckpointWriter
from ttprun.protocol import to_rank
from ttprun.protocol.rank_events import Event
from ttprun.protocol.snapshot_messages import Dumped, Share, SnapshotTaken
from ttprun.recovery.replicas import Replicas
from ttprun.state.store import CheckpointStore, Draft

LIMIT_S = 60.0


class FakeNode:
    """What Checkpoints needs of a node: ranks, to which messages are sent, and a clear end."""

    def __init__(self, persist_timeout_s: float, ranks: int = 1) -> None:
        self.config = SimpleNamespace(run_id="r1", run_dir="", persist_timeout_s=persist_timeout_s)
        self.sent: list[Any] = []  # to ranks
        self.ordered: list[Any] = []  # of other nodes
        self.slots = [SimpleNamespace(rank=rank, send=self.sent.append) for rank in range(ranks)]
        self.eyes = SimpleNamespace(command=lambda: ["train.py"])
        self.peers = Peers(ranks_per_node=ranks)
        self.called: list[Callable[[], None]] = []
        self.call = self.called.append
        self.advanced: list[Event] = []
        self.advance = self.advanced.append

        self.job = recovery.new_job(recovery.Settings(world_size=ranks))
        self.logged: list[str] = []

    def log(self, event: str, **fields: Any) -> None:
        self.logged.append(event)


class AnyCheckpoint:
    """Every checkpoint can be resumed from."""

    def open(self, path: Path, is_new: bool) -> Any:
        return SimpleNamespace(without=())


def checkpoints_of(node: FakeNode, store: CheckpointStore) -> Checkpoints:
    comparisons = SimpleNamespace(why_not_alike=lambda *_: "", names_of=", ".join, why_not_stored="")
    wire = SimpleNamespace(order_on=lambda number, order: node.ordered.append(order))
    writer = CheckpointWriter(node, store, AnyCheckpoint())  # type: ignore[arg-type]
    return Checkpoints(node, wire, writer, comparisons)  # type: ignore[arg-type]


@pytest.fixture
def buffer() -> Iterator[SnapshotBuffer]:
    """A snapshot of one rank that holds nothing."""
    made = SnapshotBuffer([os.memfd_create("records")], [os.memfd_create("share")], boundary=20)
    note_sizes(made, records=0, share=0)
    yield made
    made.close()


def note_sizes(buffer: SnapshotBuffer, records: int, share: int) -> None:
    """The only rank has written so many bytes."""
    written = Share(0, bytes=share, xxh3="", header_xxh3="h", digests={}, differing="")
    buffer.reports[0] = SnapshotTaken(number=1, boundary=20, share=written, records_bytes=records)


def write(checkpoints: Checkpoints, buffer: SnapshotBuffer) -> None:
    """A snapshot is put on the disk, or given up, and then the launcher ends."""
    checkpoints.write_snapshot(buffer, lambda: None)
    checkpoints.writer.end(is_done=False)


def test_a_checkpoint_holds_of_a_snapshot_what_the_ranks_have_written_and_nothing_behind_it(
    tmp_path: Path, buffer: SnapshotBuffer
) -> None:
    node = FakeNode(LIMIT_S)
    store = CheckpointStore(tmp_path, 3)
    for fd in (buffer.records[0], buffer.shares[0]):
        os.pwrite(fd, b"made" + bytes(100), 0)
    note_sizes(buffer, records=4, share=4)

    write(checkpoints_of(node, store), buffer)

    (checkpoint,) = store.checkpoints()
    assert checkpoint.file("tensors-00000.safetensors").read_bytes() == b"made"
    assert checkpoint.file("rank-00000.msgpack").read_bytes() == b"made"


def test_a_snapshot_that_is_shorter_than_what_the_ranks_have_written_becomes_no_checkpoint(
    tmp_path: Path, buffer: SnapshotBuffer
) -> None:
    node = FakeNode(LIMIT_S)
    store = CheckpointStore(tmp_path, 3)
    checkpoints = checkpoints_of(node, store)
    note_sizes(buffer, records=0, share=4)

    write(checkpoints, buffer)

    assert store.checkpoints() == []
    assert checkpoints.writer.status is not None
    assert "4 bytes of a snapshot are missing" in checkpoints.writer.status.reason


def test_to_look_how_far_a_checkpoint_is_does_no_harm_when_it_has_just_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ttprun.observe.console.SILENT_S", 0.0)
    monkeypatch.setattr("ttprun.observe.console._LOG_S", 0.0)
    node = FakeNode(LIMIT_S)
    checkpoints = checkpoints_of(node, CheckpointStore(tmp_path, 3))
    checkpoints.persist(recovery.Persist(generation=1, boundary=20, ranks=(0,), cause="ended"))
    folder = Path(node.sent[0].path).parent

    (folder / "part").write_bytes(b"x" * 1000)
    checkpoints.writer.look()
    shutil.rmtree(folder)
    checkpoints.writer.look()

    assert [record.message for record in caplog.records] == ["writing a checkpoint: 1.0 kB in 0 s"]
    checkpoints.writer.end(is_done=False)


def test_a_disk_that_does_not_answer_keeps_the_launcher_from_its_end_for_persist_timeout_only(
    tmp_path: Path, buffer: SnapshotBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_writing, answers = threading.Event(), threading.Event()

    def commit(draft: Draft, description: Any) -> Any:
        is_writing.set()
        assert answers.wait(LIMIT_S)
        raise AssertionError("too late")

    monkeypatch.setattr(Draft, "commit", commit)
    checkpoints = checkpoints_of(FakeNode(0.1), CheckpointStore(tmp_path, 3))
    checkpoints.write_snapshot(buffer, lambda: None)
    assert is_writing.wait(LIMIT_S)

    with caplog.at_level(logging.WARNING):
        checkpoints.writer.end(is_done=False)

    assert [record.message for record in caplog.records] == [
        "a checkpoint is still being written after 0 s (persist_timeout_s): abandoned"
    ]
    answers.set()


def persist_order(ranks: int) -> recovery.Persist:
    return recovery.Persist(generation=1, boundary=20, ranks=tuple(range(ranks)), cause="asked")


def test_who_has_asked_for_a_checkpoint_that_cannot_be_begun_hears_why(tmp_path: Path) -> None:
    node = FakeNode(LIMIT_S)
    (tmp_path / "save").write_text("a file")
    checkpoints = checkpoints_of(node, CheckpointStore(tmp_path / "save", 3))

    checkpoints.persist(persist_order(1))

    (answer,) = node.advanced
    assert isinstance(answer, recovery.StatePersisted)
    assert answer.why_not.startswith(f"no checkpoint can be written to '{tmp_path / 'save'}'")
    assert checkpoints.writer.status is not None
    assert (checkpoints.writer.status.number, checkpoints.writer.status.reason) == (1, answer.why_not)


def test_a_rank_that_cannot_write_costs_the_checkpoint_once_no_rank_writes_any_more(tmp_path: Path) -> None:
    node = FakeNode(LIMIT_S, ranks=2)
    checkpoints = checkpoints_of(node, CheckpointStore(tmp_path, 3))
    checkpoints.persist(persist_order(2))
    folder = Path(node.sent[0].path).parent
    failed = Dumped(1, "rank 1: the disk is full", is_handled=False)

    checkpoints.take_dumped(node.slots[1], failed)
    early = (list(node.advanced), folder.exists())
    share = Share(0, bytes=0, xxh3="", header_xxh3="h", digests={}, differing="")
    written = Dumped(1, "", is_handled=True, share=share)
    checkpoints.take_dumped(node.slots[0], written)

    assert early == ([], True)
    (answer,) = node.advanced
    assert isinstance(answer, recovery.StatePersisted)
    assert (answer.why_not, answer.is_handled) == ("rank 1: the disk is full", True)
    assert checkpoints.writer.status is not None
    assert (checkpoints.writer.status.boundary, checkpoints.writer.status.reason) == (20, "rank 1: the disk is full")
    assert not folder.exists()


def test_ranks_of_the_nodes_that_would_keep_mirrors_write_what_lost_ranks_alone_held(tmp_path: Path) -> None:
    node = FakeNode(LIMIT_S, ranks=8)
    node.peers = Peers(ranks_per_node=2, size=4, links={1: Any, 3: Any})  # type: ignore[dict-item]
    held = Replicas(compared_at=2, differing={"w": (0, 0, 0, 3, 4, 5, 6, 7)})
    node.job = replace(node.job, replicas=held)
    checkpoints = checkpoints_of(node, CheckpointStore(tmp_path, 3))

    # Node 2 is lost, and node 3 keeps its mirrors; node 1 is there, but none of its ranks is; rank 2 has a replica.
    checkpoints.persist(recovery.Persist(generation=1, boundary=20, ranks=(0, 1, 6, 7), cause="ended"))
    of_two_nodes = list(node.sent)
    node.sent.clear()
    checkpoints.persist(recovery.Persist(generation=1, boundary=20, ranks=(0, 1, 2), cause="ended"))

    assert [mirrored_by(dump) for dump in of_two_nodes] == [[], [], [(4, 4)], [(5, 5)]]
    assert [mirrored_by(dump) for dump in node.sent] == [[], [], [(3, 3)]]


def mirrored_by(dump: to_rank.Dump) -> list[tuple[int, int]]:
    """Lost ranks and the numbers of the shares that are to be written from their mirrors."""
    return [(one.rank, one.share) for one in dump.mirrors]


def test_a_checkpoint_that_is_given_up_leaves_nothing_but_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ttprun.observe.console.SILENT_S", 0.0)
    monkeypatch.setattr("ttprun.observe.console._LOG_S", 0.0)
    node = FakeNode(LIMIT_S)
    checkpoints = checkpoints_of(node, CheckpointStore(tmp_path, 3))
    checkpoints.persist(persist_order(1))
    folder = Path(node.sent[0].path).parent

    with caplog.at_level(logging.WARNING):
        checkpoints.give_up(recovery.GiveUpCheckpoint(0, "rank 1 was killed (SIGKILL)"))
        checkpoints.writer.look()

    assert checkpoints.writer.status is not None
    assert (checkpoints.writer.status.path, checkpoints.writer.status.reason) == ("", "rank 1 was killed (SIGKILL)")
    ours = [record.message for record in caplog.records if record.thread == threading.get_ident()]
    assert ours == ["no checkpoint: rank 1 was killed (SIGKILL)"]
    assert not folder.exists()


def test_what_becomes_of_a_checkpoint_while_the_launcher_ends_is_noted(tmp_path: Path, buffer: SnapshotBuffer) -> None:
    node = FakeNode(LIMIT_S)  # whose thread has ended: nobody carries out what it is called for
    checkpoints = checkpoints_of(node, CheckpointStore(tmp_path, 3))

    write(checkpoints, buffer)

    assert checkpoints.writer.status is not None
    assert checkpoints.writer.status.path == str(tmp_path / "step-00000020")
    assert node.logged == ["checkpoint_written"]


def test_what_becomes_of_a_checkpoint_is_noted_once(tmp_path: Path, buffer: SnapshotBuffer) -> None:
    node = FakeNode(LIMIT_S)
    is_called = threading.Event()
    node.call = lambda function: (node.called.append(function), is_called.set())  # type: ignore[assignment]
    checkpoints = checkpoints_of(node, CheckpointStore(tmp_path, 3))
    reported: list[str] = []

    checkpoints.write_snapshot(buffer, lambda: reported.append("written"))
    assert is_called.wait(LIMIT_S)
    node.called.pop()()
    checkpoints.writer.end(is_done=False)

    assert (node.logged, reported) == (["checkpoint_written"], ["written"])


def test_the_note_that_a_run_has_ended_stands_until_another_run_has_a_checkpoint(
    tmp_path: Path, buffer: SnapshotBuffer
) -> None:
    ended = checkpoints_of(FakeNode(LIMIT_S), CheckpointStore(tmp_path, 3))
    ended.writer.lock()
    ended.writer.end(is_done=True)
    other = checkpoints_of(FakeNode(LIMIT_S), CheckpointStore(tmp_path, 3))

    other.writer.lock()
    before_its_first = (tmp_path / ENDED_NAME).exists()
    write(other, buffer)

    assert (before_its_first, (tmp_path / ENDED_NAME).exists()) == (True, False)


def test_a_save_directory_that_is_gone_does_not_keep_a_job_from_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = checkpoints_of(FakeNode(LIMIT_S), CheckpointStore(tmp_path / "save", 3))
    checkpoints.writer.lock()
    shutil.rmtree(tmp_path / "save")

    with caplog.at_level(logging.WARNING):
        checkpoints.writer.end(is_done=True)

    assert [record.message for record in caplog.records] == [
        f"that this run is done could not be noted in '{tmp_path / 'save'}' (No such file or directory): the next one "
        "resumes from its last checkpoint"
    ]


def test_a_note_that_the_run_has_ended_and_stays_is_said_with_the_checkpoint(
    tmp_path: Path, buffer: SnapshotBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    """By it the next launch would start anew."""
    checkpoints = checkpoints_of(FakeNode(LIMIT_S), CheckpointStore(tmp_path, 3))
    (tmp_path / ENDED_NAME).mkdir()

    write(checkpoints, buffer)

    assert "'ended' beside it, by which a launch starts anew, stays" in str(checkpoints.writer.status)
