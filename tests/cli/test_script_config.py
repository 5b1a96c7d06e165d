"""`ttprun train.py --config job.yaml`: what of the script's own file is ours."""

import os
from pathlib import Path

import pytest

from ttprun.cli.command_line import take_script_config
from ttprun.config_sources import ConfigSource


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "both.yaml").write_text("lr: 0.1\nttprun: {standbys: 2}\n")
    (tmp_path / "ours.yaml").write_text("ttprun:\n  standbys: 3\n")
    (tmp_path / "theirs.yaml").write_text("lr: 0.1\n")
    (tmp_path / "name.yaml").write_text("ttprun: yes please\n")
    (tmp_path / "tags.yaml").write_text("ttprun: {standbys: 2}\nmodel: !include model.yaml\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe.yaml")


@pytest.mark.parametrize("spelling", [["--config", "both.yaml"], ["--config=both.yaml"]])
def test_a_file_for_both_is_read_and_stays_an_argument_of_the_script(spelling: list[str]) -> None:
    sections, arguments = take_script_config(["--lr", "1", *spelling, "x"])

    assert sections == [ConfigSource("file", "both.yaml", {"standbys": 2})]
    assert arguments == ["--lr", "1", *spelling, "x"]


@pytest.mark.parametrize("spelling", [["--config", "ours.yaml"], ["--config=ours.yaml"]])
def test_a_file_for_us_alone_is_taken_from_the_scripts_arguments(spelling: list[str]) -> None:
    sections, arguments = take_script_config(["--lr", "1", *spelling, "x"])

    assert sections == [ConfigSource("file", "ours.yaml", {"standbys": 3})]
    assert arguments == ["--lr", "1", "x"]


@pytest.mark.parametrize("name", ["theirs", "name", "tags", "binary", "pipe", "missing"])
def test_a_file_without_a_section_of_ours_or_unreadable_is_the_scripts_alone(name: str) -> None:
    line = ["--config", f"{name}.yaml", "--config"]

    assert take_script_config(line) == ([], line)


def test_every_config_is_looked_at_but_nothing_after_two_dashes() -> None:
    line = ["--config", "both.yaml", "--config=ours.yaml", "--", "--config", "ours.yaml"]

    sections, arguments = take_script_config(line)

    assert [section.name for section in sections] == ["both.yaml", "ours.yaml"]
    assert arguments == ["--config", "both.yaml", "--", "--config", "ours.yaml"]
