"""`ttprun status` on run directories written by hand."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from ttprun.cli.main import main
from ttprun.cli.run_reports import WIDTH, draw_waterfall
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import IncidentStatus, RankStatus, RunState, RunStatus, write_status

RANKS = tuple(RankStatus(rank, rank, 4000 + rank, "running", 41, "COMPUTING", 0.2) for rank in range(3))
REASON = "rank 1 was killed by SIGKILL in step 41, in backward; state of boundary 41 from rank 0 [long]"
INCIDENT = IncidentStatus(
    1, "signal 9", (1,), "replace", "recovered", REASON, 0.002, 0.011, 0.0, 0.31, 0.04, 0.05, 0.006, 0.42, 0, 41,
    had_standby=False, setup_s=0.2, first_step_s=0.3, equal=("rank 1: 1 loss in step 41",),
    not_proved=("game (sim.Game): it can change, and does not show its state", "rank 1: loss number 1 of step 41"),
)  # fmt: skip


def status_of(state: RunState) -> RunStatus:
    now = timestamp()
    return RunStatus("r1", state, 2, 3, os.getpid(), now, now, 3, 1, ranks=RANKS, incidents=(INCIDENT,))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return RunDirectory.create("r1")


@pytest.mark.parametrize(
    ("state", "code"),
    [("starting", 0), ("healthy", 0), ("done", 0), ("stopped", 0), ("recovering", 1), ("restarting", 1), ("failed", 2)],
)
def test_the_exit_code_says_whether_to_worry(run: RunDirectory, state: RunState, code: int) -> None:
    write_status(run.status, status_of(state))

    assert main(["status"]) == code
    assert main(["status", "r1", "--json"]) == code


def test_json_is_the_status_on_one_line(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    status = status_of("healthy")
    write_status(run.status, status)

    main(["status", str(run.path), "--json"])

    assert capsys.readouterr().out == status.to_json() + "\n"


def test_the_last_incident_is_drawn_phase_by_phase() -> None:
    lines = draw_waterfall(INCIDENT)

    assert [line.split()[0] for line in lines] == [
        *("detect", "freeze", "spawn", "replay", "transfer", "rebuild", "reissue")
    ]
    assert {(line.index("|"), line.rindex("|")) for line in lines} == {(9, 10 + WIDTH)}
    (replay,) = (line for line in lines if line.split()[0] == "replay")
    assert replay.count("=") == round(WIDTH * 0.31 / 0.419)
    assert replay.endswith("| 0.310 s")


def test_an_incident_that_has_reached_no_phase_has_no_drawing() -> None:
    assert draw_waterfall(IncidentStatus(1, "signal 9", (1,))) == []


def test_what_was_found_equal_is_shown_where_it_is_asked_for_and_always_whether_a_standby_was_ready(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(run.status, status_of("healthy"))

    main(["status"])
    usual = capsys.readouterr().out
    main(["status", "--proofs"])

    proof = "incident 1: equal: rank 1: 1 loss in step 41"
    assert proof not in usual
    assert proof in capsys.readouterr().out
    assert "incident 1: no standby was ready: the new process imported torch first" in usual
    assert "incident 1: of the replay the script's own set-up took 0.200 s" in usual
    assert "incident 1: 0.300 s after it all ranks had completed a step" in usual


def test_the_schema_names_every_field_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--schema"]) == 0

    schema = json.loads(capsys.readouterr().out)
    written = json.loads(status_of("healthy").to_json())
    assert schema["properties"].keys() == written.keys()
    assert schema["$defs"]["IncidentStatus"]["properties"].keys() == written["incidents"][0].keys()


def test_a_run_whose_agent_was_killed_has_failed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write_status(run.status, replace(status_of("healthy"), agent_pid=child.pid))

    code = main(["status"])

    text = capsys.readouterr().out
    assert code == 2
    assert "the agent was killed" in text
    assert text.count("lost") == 1 + 3  # the column "steps lost", and three ranks


def test_a_pipe_gets_plain_lines_that_are_not_wrapped(run: RunDirectory) -> None:
    write_status(run.status, status_of("healthy"))
    colourful = os.environ | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "40"}

    done = subprocess.run(
        [sys.executable, "-m", "ttprun", "status"], capture_output=True, text=True, check=False, env=colourful
    )

    lines = [line.rstrip() for line in done.stdout.splitlines()]
    cells = [line.split() for line in lines]
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert f"incident 1: {REASON}" in lines
    assert [f"incident 1: not proved: {one}" for one in INCIDENT.not_proved] == lines[-2:]
    assert "   1      1  4001  running    41  COMPUTING" in done.stdout
    assert ["1", "0.002", "0.011", "0.000", "0.310", "0.040", "0.050", "0.006", "0.420"] in cells


def test_a_terminal_of_80_columns_shows_everything_in_colour(run: RunDirectory) -> None:
    write_status(run.status, status_of("healthy"))
    terminal, stdout = os.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}

    done = subprocess.run(
        [sys.executable, "-m", "ttprun", "status"], stdout=stdout, check=False, env=plain | {"TERM": "xterm-256color"}
    )
    text = os.read(terminal, 100_000).decode()
    os.close(stdout)
    os.close(terminal)

    assert done.returncode == 0
    assert "\x1b[32mhealthy" in text
    assert "…" not in text
    assert "0.420" in text


def shown_on_terminal(columns: int, **environment: str) -> str:
    """What a terminal of that width gets of `ttprun status`, without colours."""
    terminal, stdout = os.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LC_CTYPE", "LANG")}
    plain |= {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "ttprun", "status"]
    shown = b""
    with subprocess.Popen(command, stdout=stdout, env=plain | environment) as child:
        os.close(stdout)
        with contextlib.suppress(OSError):  # what a terminal's side reads at the end
            while read := os.read(terminal, 100_000):
                shown += read
    os.close(terminal)
    assert child.returncode == 0
    return re.sub("\x1b\\[[0-9;]*m", "", shown.decode())


LARGE = tuple(
    RankStatus(rank, rank, 4_190_000 + rank, "replaying", 123_456, "COMPUTING", 100.2, "on") for rank in (9, 10)
)


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("nodes", [(), ("10.0.0.1", "10.0.0.2")], ids=["one node", "two nodes"])
def test_a_narrow_terminal_shows_each_rank_on_a_line_with_its_pid_and_state(
    run: RunDirectory, columns: int, nodes: tuple[str, ...]
) -> None:
    incidents = (INCIDENT, replace(INCIDENT, id=2, kind="memory-temporary", spawn_s=31.1, total_s=33.0))
    status = replace(status_of("healthy"), ranks=LARGE, incidents=incidents, nodes=nodes)
    write_status(run.status, status)
    began_s = datetime.fromisoformat(status.started_at).timestamp()
    run.history.write_text("".join(f"{began_s + second},{second}\n" for second in range(90)))

    text = shown_on_terminal(columns, LANG="C.UTF-8")

    lines = [line.rstrip("\r") for line in text.split("\n")]
    cells = [line.replace("│", " ").split() for line in lines]
    assert "…" not in text
    assert max(map(len, lines)) <= columns
    for rank in LARGE:
        (found,) = (row for row in cells if str(rank.pid) in row)
        assert {str(rank.rank), "replaying", "123456"} <= set(found)
    assert any(row[:2] == ["2", "memory-temporary"] and "recovered" in row for row in cells)
    assert any(row[0] == "2" and row[-1] == "33.0" for row in cells if row)  # of the phases
    assert sum(line.startswith("steps/s ") and line.endswith("1, at most 1") for line in lines) == 1
    assert any(line.startswith("  replay |") and line.endswith(" s") for line in lines)


def test_the_bars_of_phases_are_on_one_scale_however_narrow_the_terminal_is() -> None:
    slow = replace(INCIDENT, freeze_s=0.1, spawn_s=31.1, replay_s=1.4)

    bars = {line.split()[0]: line.count("=") for line in draw_waterfall(slow, 60)}

    assert max(map(len, draw_waterfall(slow, 60))) <= 60
    assert bars["spawn"] > 15 * bars["replay"]


@pytest.mark.parametrize("locale", [{"LANG": "C"}, {"LANG": "de_DE.UTF-8", "LC_ALL": "POSIX"}])
def test_a_terminal_whose_locale_is_not_utf_8_gets_ascii(run: RunDirectory, locale: dict[str, str]) -> None:
    status = status_of("healthy")
    write_status(run.status, status)
    began_s = datetime.fromisoformat(status.started_at).timestamp()
    run.history.write_text("".join(f"{began_s + second},{step}\n" for second, step in enumerate((1, 1, 9, 13), 1)))

    text = shown_on_terminal(80, **locale)

    assert text.isascii()
    assert "steps/s _#+ 4, at most 8" in text
    assert "run r1 - healthy - generation" in text


def test_ranks_that_are_away_are_reported_with_the_step_since_which_they_are(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = status_of("healthy")
    ranks = (*shown.ranks[:2], replace(shown.ranks[2], state="away", step=12))
    write_status(run.status, replace(shown, ranks=ranks, away=(2,)))

    code = main(["status"])

    assert code == 0
    assert "rank 2 away since step 12, training goes on with 2 of 3 ranks" in capsys.readouterr().out


def test_watching_ends_with_the_run_and_its_exit_code(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run.status, status_of("recovering"))
    failing = threading.Timer(0.2, write_status, (run.status, status_of("failed")))

    failing.start()
    code = main(["status", "--watch", "--json"])
    failing.join()

    assert code == 2
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["recovering", "failed"]


def test_watching_ends_if_the_launcher_is_killed_and_so_writes_no_more(run: RunDirectory) -> None:
    child = subprocess.Popen(["sleep", "600"])
    write_status(run.status, replace(status_of("healthy"), agent_pid=child.pid))
    threading.Timer(0.2, lambda: (child.kill(), child.wait())).start()

    assert main(["status", "--watch", "--json"]) == 2


def test_ctrl_c_ends_watching_quietly(run: RunDirectory) -> None:
    write_status(run.status, status_of("healthy"))
    command = [sys.executable, "-m", "ttprun", "status", "--watch", "--json"]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        complaint = watching.stderr.read()

    assert watching.returncode == 130
    assert complaint.strip() == ""


def test_a_run_that_has_not_written_a_status_is_answered_in_one_line(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["status"])

    assert code == 2
    assert capsys.readouterr().err.endswith("has not written a status; look again in a second\n")


def test_the_answer_waits_for_no_import_of_torch(run: RunDirectory) -> None:
    write_status(run.status, status_of("healthy"))

    command = [sys.executable, "-X", "importtime", "-m", "ttprun", "status"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == 0
    assert "ttprun" in imported
    assert imported.isdisjoint({"torch", "numpy"})


def test_the_speed_is_shown_as_a_curve_that_ends_with_the_newest(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    status = status_of("healthy")
    write_status(run.status, status)
    began_s = datetime.fromisoformat(status.started_at).timestamp()
    points = ((-9, 300), (1, 0), (2, 1), (3, 9), (4, 13), (5, 13), (6, 15))  # the first of an earlier launch
    run.history.write_text("".join(f"{began_s + after_s},{step}\n" for after_s, step in points))

    main(["status"])

    assert "steps/s █▅▁▃ 2, at most 8" in capsys.readouterr().out
