"""`ttprun stacks`, against an agent that answers one request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fakes import FakeAgent
from ttprun.cli.main import main
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RankStack, RunDirectory, StackReport, groups_of, read_stacks, replace_file
from ttprun.observe.status import RunStatus, write_status

WAITING = '  File "train.py", line 9 in <module>'
ACCEPTED = json.dumps({"op": "Accepted", "message": "", "after": 0})


def stack_of(rank: int, main: str = WAITING, doing: str = "waiting") -> RankStack:
    return RankStack(rank, 100 + rank, 12, doing, "allreduce", main, f"Thread 0x1:\n{main}\n")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """The newest run here: four ranks, of which rank 2 computes while the others wait for it."""
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.create("r1")
    now = timestamp()
    write_status(directory.status, RunStatus("r1", "healthy", 0, 4, os.getpid(), now, now))
    odd = stack_of(2, '  File "train.py", line 4 in load', "computing")
    report = StackReport(1, now, (stack_of(0), stack_of(1), odd, stack_of(3)))
    replace_file(directory.stacks, report.to_json())
    yield directory
    directory.release()


def test_ranks_that_stand_alike_are_one_group_and_who_stands_alone_comes_first() -> None:
    alone, others = groups_of([stack_of(0), stack_of(2, "", "computing"), stack_of(1)])

    assert (alone.ranks, alone.place) == ((2,), "step 12, computing")
    assert (others.ranks, others.place) == ((0, 1), "step 12, waiting in allreduce")


def test_groups_are_shown_with_the_place_and_the_stack(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAgent(run, ACCEPTED) as agent:
        code = main(["stacks"])

    assert code == 0
    assert agent.requests == [{"token": run.read_token(), "op": "TakeStacks"}]
    assert capsys.readouterr().out.splitlines() == [
        "rank 2: step 12, computing",
        '  File "train.py", line 4 in load',
        "",
        "ranks 0, 1, 3: step 12, waiting in allreduce",
        WAITING,
        "",
    ]


def test_one_rank_is_shown_with_all_of_its_threads(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAgent(run, ACCEPTED):
        code = main(["stacks", "--rank", "1"])

    assert code == 0
    assert capsys.readouterr().out == f"rank 1, pid 101\nThread 0x1:\n{WAITING}\n"


def test_a_rank_that_is_not_there_is_a_mistake_in_one_line(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeAgent(run, ACCEPTED):
        code = main(["stacks", "--rank", "7"])

    assert code == 2
    assert capsys.readouterr().err == (
        "ttprun: error: no stack of rank 7; there are those of 0, 1, 2, 3; a lost or finished rank has none\n"
    )


def test_a_file_with_something_else_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "stacks.json").write_text('{"number": 1}')

    with pytest.raises(ValueError, match="holds no stacks"):
        read_stacks(tmp_path / "stacks.json")
