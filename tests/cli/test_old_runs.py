"""Run directories of earlier runs: which stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.state.making import locked, take
from ttprun.cli.run import Keep, remove_old_runs
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import BASE, RunDirectory
from ttprun.observe.status import RunState, RunStatus, write_status


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(number: int, state: RunState = "done", is_alive: bool = False) -> RunDirectory:
    """A run, the higher its number the younger."""
    run = RunDirectory.create(f"run-{number}")
    now = timestamp()
    write_status(run.status, RunStatus(f"run-{number}", state, 0, 2, os.getpid(), now, now))
    os.utime(run.control_token, (number, number))
    if not is_alive:
        run.release()
    return run


def names() -> list[str]:
    return sorted(path.name for path in BASE.iterdir() if path.name != ".gitignore")


def test_the_newest_stay_and_the_oldest_go() -> None:
    for number in (1, 2, 3, 4):
        made(number)

    assert sorted(remove_old_runs(Keep(2), used="auto")) == ["run-1", "run-2"]
    assert names() == ["run-3", "run-4"]


def test_those_that_are_older_than_so_many_days_go() -> None:
    now_s = int(time.time())
    for days in (0, 2, 4):
        made(now_s - days * 24 * 3600)

    removed = remove_old_runs(Keep(20, days=3), used="auto")

    assert removed == [f"run-{now_s - 4 * 24 * 3600}"]


def test_the_oldest_go_if_all_together_are_too_large_but_never_the_newest() -> None:
    for number in (1, 2, 3):
        (made(number).logs / "output").write_bytes(bytes(3 * 2**20))

    kept_two = remove_old_runs(Keep(20, gib=8 / 1024), used="auto"), names()
    kept_one = remove_old_runs(Keep(20, gib=1 / 1024), used="auto"), names()

    assert kept_two == (["run-1"], ["run-2", "run-3"])
    assert kept_one == (["run-2"], ["run-3"])


def test_none_goes_that_runs_or_may_run_or_is_nobody_s_run() -> None:
    made(1, "healthy", is_alive=True)
    made(2, "healthy")  # its agent lives, as far as its status says
    (BASE / "mine").mkdir()
    (BASE / "link").symlink_to(made(3).path)
    made(4)

    remove_old_runs(Keep(1), used="auto")

    assert names() == ["link", "mine", "run-1", "run-2", "run-4"]


def test_none_goes_that_holds_a_script_s_newest_checkpoint_or_what_is_gone_on_from() -> None:
    for number in (1, 2, 3):
        take(locked(made(number).path / "checkpoints"), 10)
    made(4)

    remove_old_runs(Keep(1), used="ttprun-runs/run-1/checkpoints/step-00000010")

    assert names() == ["run-1", "run-3", "run-4"]


def test_what_was_half_removed_is_removed() -> None:
    (BASE / ".removing-run-0").mkdir(parents=True)
    (BASE / ".removing-run-0" / "file").write_text("")
    made(1)

    assert remove_old_runs(Keep(1), used="auto") == []
    assert names() == ["run-1"]


def test_without_any_run_nothing_happens() -> None:
    assert remove_old_runs(Keep(1), used="off") == []


def test_a_job_on_several_nodes_is_one_and_stays_as_long_as_one_of_its_nodes_runs() -> None:
    for job, states in ((1, ("done", "done")), (2, ("done", "healthy")), (3, ("done", "done")), (4, ("done", "done"))):
        for node, state in enumerate(states):
            run = RunDirectory.create(f"{job}/node-{node}")
            now = timestamp()
            write_status(run.status, RunStatus(str(job), state, 0, 2, os.getpid(), now, now))
            os.utime(run.control_token, (job, job))
            run.release()

    assert remove_old_runs(Keep(1), used="auto") == ["3", "1"]
    assert names() == ["2", "4"]
