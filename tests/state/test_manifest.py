"""What `ttprun.json` says, and that no damage to it goes unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.state.making import flip_byte, locked, take
from ttprun.state.checkpoint import MANIFEST_NAME, Description, read_manifest
from ttprun.state.files import InvalidCheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return take(locked(tmp_path), 120).path


def rewrite(folder: Path, **changes: Any) -> None:
    """Change keys of a manifest by hand; None takes one out."""
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_a_manifest_says_what_was_written_and_by_what(tmp_path: Path) -> None:
    draft = locked(tmp_path, run_id="night").begin(120)
    entry = draft.add("rank-00000.msgpack", b"records")
    model = {"self.model": {"w": ("tensors-00000.safetensors", "model/w")}}
    taken = draft.commit(Description(world_size=2, cause="signal", script="train.py", model=model))

    manifest = read_manifest(taken.path)

    assert manifest == taken.manifest
    assert (manifest.run_id, manifest.boundary, manifest.cause, manifest.world_size) == ("night", 120, "signal", 2)
    assert manifest.files == {"rank-00000.msgpack": entry}
    assert manifest.model == model
    assert manifest.created_at.endswith("+00:00")
    assert set(manifest.versions) == {"ttprun", "torch", "python"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 1}, "is of format 1, and this ttprun reads format 3"),
        ({"format": None}, "is of format None, and this ttprun reads format 3"),
        ({"format": "x" * 1000}, f"is of format '{'x' * 39}, and this ttprun reads format 3"),
        ({"boundary": None}, "boundary: field required"),
        ({"boundary": "120"}, "boundary: input should be a valid integer"),
        ({"boundary": 121}, "is damaged: its checksum does not match"),
        ({"missing": None}, "is damaged: its checksum does not match"),
        ({"checksum": None}, "is damaged: its checksum does not match"),
        ({"mood": "good"}, "mood: extra inputs are not permitted"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "xxh3": "0" * 32}}}, "files.../../etc/passwd"),
    ],
)
def test_a_manifest_that_was_changed_is_refused_with_the_reason(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    rewrite(folder, **changes)

    with pytest.raises(InvalidCheckpointError) as refused:
        read_manifest(folder)

    assert refused.value.reason.startswith(MANIFEST_NAME)
    assert reason in refused.value.reason


def test_a_manifest_that_is_cut_off_is_refused_at_any_length(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    whole = path.read_bytes().rstrip()

    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])

        with pytest.raises(InvalidCheckpointError, match="is not"):
            read_manifest(folder)


def test_a_bit_that_flips_anywhere_in_a_manifest_changes_nothing_unseen(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    whole = path.read_bytes()
    manifest = read_manifest(folder)
    refused = 0

    for offset in range(len(whole)):
        path.write_bytes(whole)
        flip_byte(path, offset)
        try:
            assert read_manifest(folder) == manifest  # one of JSON's blanks
        except InvalidCheckpointError:
            refused += 1

    assert refused > 0.8 * len(whole)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"[1]", "ttprun.json is not a JSON object"), (b"\xff\xfe", "ttprun.json is not valid JSON")],
)
def test_other_content_is_no_manifest(folder: Path, content: bytes, reason: str) -> None:
    (folder / MANIFEST_NAME).write_bytes(content)

    with pytest.raises(InvalidCheckpointError, match=reason):
        read_manifest(folder)


def test_a_directory_without_a_manifest_and_no_directory_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"^there is no ttprun\.json in it$"):
        read_manifest(tmp_path)

    with pytest.raises(InvalidCheckpointError, match=r"^there is no such directory$"):
        read_manifest(tmp_path / "none")
