"""`--on-event`, with real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.waits import becomes_ready
from tests.web.runs import incident_event, status_of, write_run
from ttprun.config_sources import resolve
from ttprun.errors import ConfigError
from ttprun.observe.events import USUAL, timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.web.notifier import MOST_WAITING, notifying, run_command

LIMIT_S = 100


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = write_run(tmp_path / "run", status_of())
    run.events.write_text("")
    return run


def log(run: RunDirectory, *events: dict[str, Any]) -> None:
    with open(run.events, "a") as file:
        file.write("".join(json.dumps({"at": timestamp()} | event) + "\n" for event in events))


def reported(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_command_is_notified_of_an_incidents_end_and_of_the_runs(run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out"

    with notifying(f"cat >> {out}", USUAL, run):
        log(run, incident_event(40, "open", 40), incident_event(41, "open", 40), incident_event(42, "recovered", 40))
        log(run, {"event": "rank_started", "rank": 1}, {"event": "run_ended", "exit_code": 0})

    assert [event["kind"] for event in reported(out)] == ["incident_ended", "run_ended"]
    assert reported(out)[0] | {"run_id": "r1", "step": 50, "dropped": 0} == reported(out)[0]
    assert reported(out)[0]["event"]["outcome"] == "recovered"


def test_the_beginning_of_an_incident_is_reported_once_if_it_is_asked_for(run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out"

    with notifying(f"cat >> {out}", ["incident_opened"], run):
        log(run, incident_event(40, "open", 40), incident_event(41, "open", 40), {"event": "run_ended"})

    assert [event["kind"] for event in reported(out)] == ["incident_opened"]


def test_of_a_flood_the_newest_are_reported_and_how_many_were_left_out(run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out"

    with notifying(f"cat >> {out}", ["stalled"], run):
        log(run, *({"event": "stalled", "boundary": number} for number in range(500)), {"event": "run_ended"})

    assert len(reported(out)) <= 2 * MOST_WAITING
    assert reported(out)[-1]["event"]["boundary"] == 499
    assert len(reported(out)) + sum(event["dropped"] for event in reported(out)) == 500


def test_a_command_that_does_not_end_is_killed_with_all_that_it_has_started() -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)

    with pytest.raises(subprocess.TimeoutExpired):
        run_command(f"sleep 1000 >&{theirs} & sleep 1000", b"{}", limit_s=0.2)

    os.close(theirs)
    assert becomes_ready(ours)  # nobody has the other end any more
    os.close(ours)


def test_a_command_that_fails_is_reported_once(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    with notifying("exit 3", ["stalled"], run):
        log(run, {"event": "stalled"}, {"event": "stalled"}, {"event": "run_ended"})

    assert capfd.readouterr().err.splitlines() == [
        "ttprun: 'exit 3', run for an event, has failed (exit code 3); the job continues"
    ]


@pytest.fixture
def launcher(run: RunDirectory, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    program = f"""
import sys
from ttprun.observe.run_directory import RunDirectory
from ttprun.web.notifier import notifying
with notifying("cat > {tmp_path}/fifo", ["launcher_died"], RunDirectory({str(run.path)!r})):
    print("begun", flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as started:  # type: ignore[call-overload]
        yield started


def test_the_death_of_the_launcher_is_reported(
    launcher: subprocess.Popen[str], run: RunDirectory, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert launcher.stdout is not None
    launcher.stdout.readline()

    launcher.kill()

    with closing(open(tmp_path / "fifo")) as fifo:
        assert json.loads(fifo.readline())["kind"] == "launcher_died"


def test_a_kind_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match=r"^--on-event-kinds: .*incident_opened"):
        resolve([], {}, {"on_event": "cat", "on_event_kinds": "incident_ended,ranked_died"})
