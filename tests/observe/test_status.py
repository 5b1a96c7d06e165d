"""The status file."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ttprun.observe.events import timestamp
from ttprun.observe.status import IncidentStatus, RankStatus, RunStatus, parse_status, read_status, write_status

RANKS = (
    RankStatus(0, 0, 4242, "running", 7, "COMPUTING", 0.1),
    RankStatus(1, 1, 4243, "finished", 9, "FINISHED", 0.1),
)
INCIDENT = IncidentStatus(1, "signal 9", (1,), "replace", "recovered", detect_s=0.01, total_s=0.5, steps_lost=0)


def running() -> RunStatus:
    now = timestamp()
    return RunStatus("r1", "healthy", 2, 2, os.getpid(), now, now, 3, 1, ranks=RANKS, incidents=(INCIDENT,))


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_status_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = running()

    assert write_status(tmp_path / "status.json", written)

    assert read_status(tmp_path / "status.json") == written
    assert os.listdir(tmp_path) == ["status.json"]


def test_the_json_has_the_documented_fields(tmp_path: Path) -> None:
    raw = json.loads(running().to_json())

    assert {"run_id", "state", "generation", "world_size", "ranks", "incidents"} <= raw.keys()
    assert {"rank", "local_rank", "pid", "state", "step", "phase"} <= raw["ranks"][0].keys()
    documented = (
        "id kind ranks rung outcome reason detect_s spawn_s replay_s transfer_s rebuild_s reissue_s total_s steps_lost"
    )
    assert set(documented.split()) <= raw["incidents"][0].keys()


def test_a_run_whose_agent_is_dead_reads_as_failed_and_its_ranks_as_lost(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", replace(running(), agent_pid=dead_pid()))

    status = read_status(tmp_path / "status.json")

    assert (status.state, status.reason) == ("failed", "the agent was killed")
    assert [rank.state for rank in status.ranks] == ["lost", "finished"]


def test_an_agent_that_nobody_has_waited_for_is_dead_too(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        write_status(tmp_path / "status.json", replace(running(), agent_pid=zombie.pid))

        status = read_status(tmp_path / "status.json")

    assert status.state == "failed"


def test_a_later_process_with_the_agents_number_is_not_the_agent(tmp_path: Path) -> None:
    long_ago = "2020-01-01T00:00:00.000+00:00"
    write_status(tmp_path / "status.json", replace(running(), updated_at=long_ago))

    assert read_status(tmp_path / "status.json").state == "failed"


def test_an_agent_on_another_host_is_believed(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", replace(running(), agent_pid=dead_pid(), host="elsewhere"))

    assert read_status(tmp_path / "status.json").state == "healthy"


def test_a_run_that_has_ended_stays_as_it_ended(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", replace(running(), state="done", agent_pid=dead_pid(), exit_code=0))

    assert read_status(tmp_path / "status.json").state == "done"


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    raw = json.loads(running().to_json())
    raw["mood"] = raw["ranks"][0]["mood"] = "good"
    (tmp_path / "status.json").write_text(json.dumps(raw))

    assert read_status(tmp_path / "status.json").ranks == RANKS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"incidents": [1]}'])
def test_a_file_that_is_no_status_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)

    with pytest.raises(ValueError):  # noqa: PT011  (the reason is json's or ours)
        read_status(tmp_path / "status.json")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1e308])
def test_a_time_that_is_none_is_refused_by_its_name(value: float) -> None:
    damaged = replace(running(), incidents=(replace(INCIDENT, spawn_s=value),))

    with pytest.raises(ValueError, match="it is not the status of a run: spawn_s is"):
        parse_status(damaged.to_json())


def test_a_status_that_cannot_be_written_warns_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        results = [write_status("/proc/nowhere/status.json", running()) for _ in range(3)]

    assert results == [False, False, False]
    assert len(caplog.records) == 1
