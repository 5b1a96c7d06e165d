"""`ttprun recall`, against an agent that answers one request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.fakes import FakeAgent
from ttprun.cli.main import main
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RunStatus, read_status, write_status


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """The newest run here."""
    monkeypatch.chdir(tmp_path)
    found = RunDirectory.create("r1")
    now = timestamp()
    write_status(found.status, RunStatus("r1", "healthy", 0, 4, os.getpid(), now, now))
    yield found
    found.release()


def test_the_agent_is_asked_and_says_who_comes_back(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAgent(run, json.dumps({"op": "Accepted", "message": "rank 2, 3 called back"})) as agent:
        code = main(["recall"])

    assert code == 0
    assert agent.requests == [{"token": run.read_token(), "op": "Recall"}]
    assert capsys.readouterr().out == "rank 2, 3 called back\n"


def test_a_refusal_is_one_line(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAgent(run, json.dumps({"op": "Rejected", "error": "no rank is away"})):
        code = main(["recall", "--json"])

    assert code == 2
    assert capsys.readouterr().err == "ttprun: error: no rank was called back: no rank is away; see 'ttprun status'\n"


def test_of_a_run_that_has_ended_nobody_is_asked(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run.status, replace(read_status(run.status), state="done"))

    code = main(["recall"])

    assert code == 2
    assert capsys.readouterr().err == "ttprun: error: run r1 has ended (done); name a running one\n"
