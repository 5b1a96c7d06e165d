"""A launcher that is killed at any system call on its run directory leaves one that the next run can use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system_calls import killed_at_each_change, why_not_traced
from ttprun.cli.run import Keep, remove_old_runs
from ttprun.observe.events import EventLog, read_events, timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RunStatus, read_status, write_status

pytestmark = pytest.mark.skipif(bool(why_not_traced()), reason=why_not_traced())


def status(steps: int) -> RunStatus:
    return RunStatus("run", "done", 0, steps, os.getpid(), timestamp(), timestamp())


def ended(path: Path, started_at_s: int = 1) -> None:
    """A run that has ended, with an event and a log."""
    run = RunDirectory.create("run", path)
    write_status(run.status, status(1))
    EventLog(run.events).append("first")
    (run.logs / "rank-0.log").write_text("a line\n")
    os.utime(run.control_token, (started_at_s, started_at_s))
    run.release()


def began(path: Path) -> None:
    """A run begins there."""
    run = RunDirectory.create("run", path)
    EventLog(run.events).append("second")
    write_status(run.status, status(2))


def test_killed_while_a_run_directory_is_made_it_can_be_used_by_the_next_run(tmp_path: Path) -> None:
    places = list(killed_at_each_change(tmp_path, lambda place: None, began))
    tokens = [RunDirectory.create("run", place).read_token() for place in places]

    assert len({*tokens}) == len(places) > 5


def test_killed_while_a_run_directory_is_used_again_what_the_last_run_left_stays(tmp_path: Path) -> None:
    places = list(killed_at_each_change(tmp_path, ended, began))
    found = [RunDirectory.find(str(place)) for place in places]
    events = [[event["event"] for event in read_events(run.events)] for run in found]
    tokens = [RunDirectory.create("run", place).read_token() for place in places]

    assert all(run.is_run and (run.logs / "rank-0.log").read_text() == "a line\n" for run in found)
    assert all(reported in (["first"], ["first", "second"]) for reported in events)
    assert events[-1] == ["first", "second"]
    assert len({*tokens}) == len(places) > 6


def test_killed_while_a_status_is_written_the_old_or_the_new_one_is_there(tmp_path: Path) -> None:
    places = killed_at_each_change(tmp_path, ended, lambda place: write_status(place / "status.json", status(2)))
    steps = [read_status(place / "status.json").world_size for place in places]

    assert steps == sorted(steps)
    assert {*steps} == {1, 2}


def test_killed_while_old_runs_are_removed_none_is_half_there_and_the_next_run_removes_the_rest(tmp_path: Path) -> None:
    def prepare(place: Path) -> None:
        for number in (1, 2):
            ended(place / f"run-{number}", number)

    for place in killed_at_each_change(tmp_path, prepare, lambda place: remove_old_runs(Keep(1), "auto", place)):
        left = {path.name for path in place.iterdir() if not path.name.startswith(".")}
        assert left in ({"run-1", "run-2"}, {"run-2"}), place
        assert all((place / name / "logs/rank-0.log").exists() for name in left), place
        remove_old_runs(Keep(1), "auto", place)
        assert [path.name for path in place.iterdir()] == ["run-2"]
