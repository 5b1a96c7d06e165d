"""`ttprun inject-fault` against a stand-in for the agent."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.fakes import FakeAgent
from ttprun.chaos.injected_faults import KINDS, PHASES
from ttprun.cli.main import main
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RunStatus, write_status

KILL = ["inject-fault", "kill", "--rank", "1"]


def status_of_a_living_run() -> RunStatus:
    now = timestamp()
    return RunStatus("r1", "healthy", 1, 3, os.getpid(), now, now)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("night")
    write_status(run.status, status_of_a_living_run())
    return run


def test_the_list_names_every_kind_and_phase(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["inject-fault", "list"])

    words = capsys.readouterr().out.split()
    assert code == 0
    assert {*KINDS, *PHASES} <= set(words)


def test_the_agent_is_asked_with_the_runs_token_and_its_answer_is_shown(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeAgent(run, '{"op": "Accepted", "message": "rank 1 will be killed"}') as agent:
        code = main([*KILL, "--at-step", "5", "--phase", "backward", "--run", "night"])

    assert code == 0
    assert capsys.readouterr().out == "rank 1 will be killed\n"
    assert agent.requests == [
        {"token": run.read_token(), "op": "InjectFault", "fault": "kill:rank=1,step=5,phase=backward"}
    ]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ('{"op": "Rejected", "error": "rank 1 is in recovery"}', "the run refuses the fault: rank 1 is in recovery"),
        *[(answer, "the run's agent does not answer") for answer in ("", "hello", "[]")],
    ],
)
def test_what_the_agent_refuses_or_does_not_answer_is_an_error(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], answer: str, complaint: str
) -> None:
    with FakeAgent(run, answer):
        code = main(KILL)

    assert code == 2
    assert complaint in capsys.readouterr().err


def test_a_schedule_is_one_order(run: RunDirectory) -> None:
    with FakeAgent(run, '{"op": "Accepted", "message": "ordered"}') as agent:
        code = main(["inject-fault", "kill,exit", "--every", "5steps", "--count", "3", "--seed", "7", "--code", "4"])

    assert code == 0
    assert agent.requests[0]["fault"] == "kill,exit:every=5steps,count=3,seed=7,code=4"


def test_the_answer_is_there_in_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAgent(run, '{"op": "Accepted", "message": "armed"}'):
        code = main([*KILL, "--json"])

    reported = json.loads(capsys.readouterr().out)
    assert code == 0
    assert reported == {"run_id": "r1", "fault": "kill:rank=1", "dry_run": False, "message": "armed"}


def test_a_dry_run_shows_what_would_be_done_and_asks_nobody(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inject-fault", "random", "--seed", "3", "--count", "2", "--dry-run"]

    code = main([*words, "--json"])
    reported = json.loads(capsys.readouterr().out)
    main(words)

    assert code == 0
    assert [strike["kind"] for strike in reported["strikes"]] == ["segv", "segv"]
    assert "nothing is done" in capsys.readouterr().out


def test_a_schedule_without_end_is_shown_in_part(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["inject-fault", "kill", "--rank", "1", "--every", "10s", "--dry-run"])

    out = capsys.readouterr().out
    assert code == 0
    assert "200 s" in out
    assert out.endswith("... and so on\n")


def test_the_list_is_there_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["inject-fault", "list", "--json"])

    reported = json.loads(capsys.readouterr().out)
    assert code == 0
    assert reported["kinds"].keys() == KINDS.keys()
    assert reported["kinds"]["nan"]["phases"] == ["backward", "collective"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["kil", "--rank", "1"], "there is no fault 'kil'; did you mean 'kill'?"),
        (["kill", "--rank", "1", "--phase", "foward"], "there is no phase 'foward'; did you mean 'forward'?"),
        (["kill"], "fault 'kill' names no rank; write KIND:rank=R"),
        (["random"], "fault 'random' leaves its kind open; add a seed, as in random:seed=1"),
        (["silent", "--rank", "1", "--peer", "3", "--dry-run"], "there is no rank 3; this run has 3 ranks"),
        (["kill", "--rank", "1", "--code", "3"], "fault 'kill:rank=1,code=3': code does not fit kill; it is"),
        (["leave", "--rank", "1", "--phase", "start"], "leave cannot strike in phase start (the script's code does"),
        (["kill", "--rank", "1", "--after", "-1"], "fault 'kill:rank=1,after=-1.0': after is '-1.0'"),
        (["kill", "--rank", "3", "--dry-run"], "there is no rank 3; this run has 3 ranks"),
        (["kill", "--rank", "-1"], "fault 'kill:rank=-1': rank is '-1'; write a whole number from 0"),
        (["kill", "--rank", "1", "--run", "nihgt"], "there is no run 'nihgt'; did you mean 'night'?"),
        (["kill", "--rank", "1"], "the run's agent does not answer ("),
    ],
)
def test_a_fault_that_cannot_be_is_answered_in_one_line(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], line: list[str], complaint: str
) -> None:
    code = main(["inject-fault", *line])

    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(f"ttprun: error: {complaint}")
    assert error.count("\n") == 1


def test_a_run_that_has_ended_is_not_broken(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run.status, replace(status_of_a_living_run(), state="done"))

    assert main(KILL) == 2
    assert "run r1 has ended (done); name a running one" in capsys.readouterr().err
