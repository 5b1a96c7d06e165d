"""Whatever a command prints can be printed to a stream whose encoding lacks our dots, dashes and arrows."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.web.runs import REPLACED
from ttprun.cli import main as module
from ttprun.cli.guide import TOPICS
from ttprun.cli.main import main
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RankStatus, RunStatus, write_status


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that has lost a rank."""
    monkeypatch.chdir(tmp_path)
    found = RunDirectory.create("r1")
    ranks = tuple(RankStatus(rank, rank, 4000 + rank, "running", 41, "COMPUTING", 0.2) for rank in range(2))
    status = RunStatus("r1", "healthy", 2, 2, os.getpid(), timestamp(), timestamp(), ranks=ranks, incidents=(REPLACED,))
    write_status(found.status, status)
    return found


def printed(words: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints to a stdout of this encoding."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with contextlib.suppress(SystemExit):
            main(words)
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "words",
    [["status"], ["report", "--markdown"], ["explain"], ["--help"], ["check", "--help"], ["guide"]],
    ids=" ".join,
)
def test_a_command_prints_all_of_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, words: list[str], encoding: str
) -> None:
    assert printed(words, encoding, monkeypatch)


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_of_the_guide_is_printed(monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
    assert printed(["guide", topic], "ascii", monkeypatch).startswith("# ")


def test_in_place_of_what_the_encoding_lacks_stands_what_looks_alike(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = printed(["status"], "ascii", monkeypatch).splitlines()[0]

    assert first.startswith("run r1 - healthy - ")


def test_what_looks_like_nothing_known_is_escaped() -> None:
    assert "caf\xe9 · 漢 →".encode("ascii", module.ALIKE) == b"caf\\xe9 - \\u6f22 ->"


def test_the_status_comes_through_a_pipe_that_takes_ascii_alone(run: RunDirectory) -> None:
    command = [sys.executable, "-m", "ttprun", "status"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}

    found = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)

    assert found.stderr == b""
    assert found.stdout.startswith(b"run r1 - healthy - ")
