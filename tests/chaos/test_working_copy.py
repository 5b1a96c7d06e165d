"""The copy of the working folder in which a check runs a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttprun.chaos.trial.twins import WorkingCopy, check_size
from ttprun.errors import ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "venv").mkdir()
    (folder / "__pycache__").mkdir()
    (folder / "train.py").write_text("pass\n")
    (folder / "src" / "model.py").write_text("pass\n")
    (folder / "data" / "rows.bin").write_bytes(b"x" * 100)
    (folder / "venv" / "pyvenv.cfg").write_text("")
    return folder


def test_what_is_written_in_the_copy_does_not_reach_the_users_folder(source: Path, tmp_path: Path) -> None:
    copy = WorkingCopy.make(source, tmp_path / "work", [])

    (copy.folder / "train.py").write_text("other\n")
    (copy.folder / "out").mkdir()
    (copy.folder / "out" / "final.pt").write_text("weights")

    assert copy.changed() == ["out/final.pt", "train.py"]
    assert (source / "train.py").read_text() == "pass\n"
    assert not (source / "out").exists()


def test_environments_and_shared_folders_are_linked_and_caches_left_out(source: Path, tmp_path: Path) -> None:
    copy = WorkingCopy.make(source, tmp_path / "work", ["data"])

    assert (copy.folder / "data").resolve() == source / "data"
    assert (copy.folder / "venv").resolve() == source / "venv"
    assert not (copy.folder / "src").is_symlink()
    assert not (copy.folder / "__pycache__").exists()
    assert copy.changed() == []


def test_a_large_folder_is_refused_with_the_name_of_what_is_large(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"largest: 'data'.*--share data"):
        check_size(source, [], limit_bytes=50)

    check_size(source, ["data"], limit_bytes=50)


def test_a_name_to_share_must_be_there(source: Path) -> None:
    with pytest.raises(ConfigError, match="there is no 'rows'"):
        check_size(source, ["rows"])


def test_paths_go_into_the_copy_and_messages_come_back_with_the_users_own(source: Path, tmp_path: Path) -> None:
    copy = WorkingCopy.make(source, tmp_path / "work", [])

    assert copy.inside(str(source / "train.py")) == str(tmp_path / "work" / "train.py")
    assert copy.inside("train.py") == "train.py"
    assert copy.inside("/etc/hosts") == "/etc/hosts"
    assert copy.as_users(f"a loop in {tmp_path}/work/train.py:3") == "a loop in train.py:3"


def test_in_place_nothing_is_copied(source: Path) -> None:
    copy = WorkingCopy.none(source)

    assert copy.folder == source
    assert copy.inside(str(source / "train.py")) == str(source / "train.py")
    assert copy.changed() == []
