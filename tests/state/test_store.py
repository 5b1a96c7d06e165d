"""Which checkpoints are written, found, kept and left alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.state.making import DESCRIPTION, flip_byte, locked, names, newest_valid, take, why_invalid
from ttprun.state.checkpoint import MANIFEST_NAME, verify
from ttprun.state.files import CannotWriteError, FileEntry, InvalidCheckpointError, read_entry
from ttprun.state.store import CheckpointStore, read_latest

TENSORS = "tensors-00000.safetensors"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_checkpoint_is_its_owners_alone_and_latest_names_it(tmp_path: Path) -> None:
    taken = take(locked(tmp_path / "save"), 120)

    assert names(tmp_path / "save") == {"step-00000120", "latest"}
    assert read_latest(tmp_path / "save") == "step-00000120"
    assert {path.name for path in taken.path.iterdir()} == {"rank-00000.msgpack", TENSORS, MANIFEST_NAME}
    assert mode(tmp_path / "save") == mode(taken.path) == 0o700
    assert {mode(path) for path in taken.path.iterdir()} == {0o600}


def test_what_another_process_wrote_belongs_to_the_checkpoint_with_its_digest(tmp_path: Path) -> None:
    draft = locked(tmp_path).begin(5)
    draft.path("handed-in").write_bytes(b"a" * 10)
    draft.path("hashed-by-us").write_bytes(b"b" * 10)
    reported = FileEntry(bytes=10, xxh3="0" * 32)
    draft.record("handed-in", reported)

    taken = draft.commit(DESCRIPTION)

    assert taken.manifest is not None
    assert taken.manifest.files == {"handed-in": reported, "hashed-by-us": read_entry(taken.file("hashed-by-us"))}


def test_chunks_are_written_one_after_the_other(tmp_path: Path) -> None:
    draft = locked(tmp_path).begin(5)

    entry = draft.add("numbers", (memoryview(bytes([n] * 3)) for n in range(4)))

    assert draft.path("numbers").read_bytes() == b"\0\0\0\1\1\1\2\2\2\3\3\3"
    assert entry == read_entry(draft.path("numbers"))
    assert entry.bytes == 12


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_file_that_is_not_what_its_writer_says_ends_the_draft(tmp_path: Path, content: bytes | None) -> None:
    store = locked(tmp_path)
    older = take(store, 100)
    draft = store.begin(120)
    draft.record(TENSORS, FileEntry(bytes=10, xxh3="0" * 32))
    if content is not None:
        draft.path(TENSORS).write_bytes(content)

    with pytest.raises(CannotWriteError, match=rf"{TENSORS} (is not there|has 5 bytes, and its writer reported 10)"):
        draft.commit(DESCRIPTION)

    assert names(tmp_path) == {older.name, "latest"}


def test_the_newest_n_are_kept(tmp_path: Path) -> None:
    store = locked(tmp_path, keep=2)

    for boundary in (10, 20, 30, 40):
        take(store, boundary)

    assert names(tmp_path) == {"step-00000030", "step-00000040", "latest"}


def test_with_one_to_keep_the_older_goes_only_after_the_newer_is_there(tmp_path: Path) -> None:
    store = locked(tmp_path, keep=1)
    take(store, 10)
    seen = []

    newer = CheckpointStore(tmp_path, keep=1, at=lambda point: seen.append((point, names(tmp_path))))
    store.unlock()
    newer.lock("r2")
    take(newer, 20)

    assert all("step-00000010" in there for point, there in seen if not point.startswith("old one"))
    assert dict(seen)["old one set aside"] == {"step-00000020", "latest", ".removing-step-00000010"}
    assert names(tmp_path) == {"step-00000020", "latest"}


def test_damaged_incomplete_and_foreign_directories_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "mine.pt").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    store = locked(tmp_path, keep=1)
    truncated = take(store, 10)
    os.truncate(truncated.file(TENSORS), 3)
    incomplete = store.begin(15)
    incomplete.add(TENSORS, b"half")
    incomplete.keep_incomplete(DESCRIPTION, ["layer.weight[512:1024] of rank 1"])
    kept = take(store, 20)

    take(store, 30)

    foreign = {"step-00000001", "notes.txt"}
    assert names(tmp_path) == foreign | {"step-00000010", "incomplete-step-00000015", "step-00000030", "latest"}
    assert not kept.path.exists()
    assert (tmp_path / "step-00000001" / "mine.pt").exists()


def test_one_that_was_found_damaged_at_the_resume_is_not_removed_later(tmp_path: Path) -> None:
    store = locked(tmp_path, keep=1)
    take(store, 10)
    damaged = take(store, 20)
    flip_byte(damaged.file(TENSORS))

    assert newest_valid(store) is None
    take(store, 20)
    take(store, 30)

    assert names(tmp_path) == {"step-00000020", "step-00000030", "latest"}


def test_a_checkpoint_taken_again_at_the_same_boundary_replaces_the_first(tmp_path: Path) -> None:
    store = locked(tmp_path)
    take(store, 100)
    take(store, 120, b"first")

    again = take(store, 120, b"second")

    assert newest_valid(store) == again
    assert again.file(TENSORS).read_bytes() == b"second"
    assert why_invalid(store) == {}
    assert names(tmp_path) == {"step-00000100", again.name, "latest"}
    assert read_latest(tmp_path) == again.name


def test_without_a_checkpoint_none_is_found(tmp_path: Path) -> None:
    assert newest_valid(CheckpointStore(tmp_path / "none")) is None


def test_the_newest_valid_one_is_found_and_each_newer_one_has_a_reason(tmp_path: Path) -> None:
    store = locked(tmp_path, keep=9)
    take(store, 10)
    good = take(store, 20)
    os.truncate(take(store, 30).file(TENSORS), 3)
    flip_byte(take(store, 40).file(TENSORS))
    (take(store, 50).path / MANIFEST_NAME).unlink()
    draft = store.begin(60)
    draft.add(TENSORS, b"half")
    draft.keep_incomplete(DESCRIPTION, ["b.weight of rank 1", "c.weight of rank 1"])
    before = names(tmp_path)

    assert newest_valid(CheckpointStore(tmp_path)) == good
    assert why_invalid(CheckpointStore(tmp_path)) == {
        "step-00000030": f"{TENSORS} has 3 bytes, and 7 were written",
        "step-00000040": f"{TENSORS} is damaged: its content differs from what was written",
        "step-00000050": "there is no ttprun.json in it",
        "incomplete-step-00000060": "it is incomplete: b.weight of rank 1, c.weight of rank 1 missing",
    }
    assert names(tmp_path) == before


def test_an_incomplete_one_is_not_taken_under_another_name_either(tmp_path: Path) -> None:
    draft = locked(tmp_path).begin(60)
    draft.add(TENSORS, b"half")
    kept = draft.keep_incomplete(DESCRIPTION, ["b.weight of rank 1"])
    kept.path.rename(tmp_path / "step-00000060")

    assert newest_valid(CheckpointStore(tmp_path)) is None
    with pytest.raises(InvalidCheckpointError, match=r"it is incomplete: b\.weight of rank 1 missing"):
        kept.valid_manifest()


def test_two_incomplete_ones_of_a_boundary_are_both_kept(tmp_path: Path) -> None:
    store = locked(tmp_path)

    for content in (b"first", b"second"):
        draft = store.begin(60)
        draft.add(TENSORS, content)
        draft.keep_incomplete(DESCRIPTION, ["b.weight of rank 1"])

    assert names(tmp_path) == {"incomplete-step-00000060", "incomplete-step-00000060-2"}
    with pytest.raises(ValueError, match="must say what is missing"):
        store.begin(61).keep_incomplete(DESCRIPTION, [])


def test_after_going_back_on_purpose_the_one_written_last_is_the_newest(tmp_path: Path) -> None:
    store = locked(tmp_path, keep=2)
    for boundary in (120, 140):
        take(store, boundary)

    taken = take(store, 110)

    assert newest_valid(store) == taken
    assert names(tmp_path) == {"step-00000110", "step-00000140", "latest"}
    assert [one.boundary for one in store.checkpoints()] == [140, 110]


def test_verifying_reports_how_far_it_is_and_every_file_that_is_damaged(tmp_path: Path) -> None:
    taken = take(locked(tmp_path), 10)
    flip_byte(taken.file(TENSORS))
    taken.file("rank-00000.msgpack").unlink()
    steps = []

    found = verify(taken, lambda done, of: steps.append((done, of)))

    assert found.reason == (
        f"rank-00000.msgpack cannot be read (No such file or directory); "
        f"{TENSORS} is damaged: its content differs from what was written"
    )
    assert steps == [(7, 14)]


def test_what_another_run_wrote_is_found_too(tmp_path: Path) -> None:
    first = locked(tmp_path, "r1")
    taken = take(first, 10)
    first.unlock()

    assert newest_valid(locked(tmp_path, "r2")) == taken
