"""`ttprun report`."""

import json
import re
from pathlib import Path

import pytest

from tests.web.runs import status_of, write_run
from ttprun.cli.main import main
from ttprun.observe.run_view import RunView
from ttprun.web.metrics import RunCollector, StepTimes

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>')


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    return str(write_run(tmp_path / "run", status_of(state="done", exit_code=0)).path)


def test_a_report_is_one_file_with_all_that_it_shows(run_dir: str, tmp_path: Path) -> None:
    code = main(["report", run_dir, "-o", str(tmp_path / "r.html")])

    text = (tmp_path / "r.html").read_text()
    data = json.loads(DATA.search(text)[1])  # type: ignore[index]
    assert code == 0
    assert data["status"]["incidents"][0]["outcome"] == "recovered"
    assert data["events"][-1]["text"] == "</script><b>bold</b>"  # what a script prints cannot end the data
    assert not any(event.get("reason") == "an earlier launch" for event in data["events"])
    assert data["history"][-1][1] == 50
    assert text.count("</script>") == 2


def test_the_same_as_markdown_goes_to_standard_output(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["report", run_dir, "--markdown"])

    out = capsys.readouterr().out
    assert code == 0
    assert "Done after step 50 on 4 ranks, with 1 incident, 0 steps lost." in out
    assert "| productive: steps done for the first time | 38.0 | 63.3 % |" in out
    assert "| incidents, from the loss to the next step | 2.0 | 3.3 % |" in out
    assert "| 0.000 | 0.100 | 0.200 | 0.900 | 0.200 | 0.300 | 0.500 | 2.000 |" in out
    assert "* not proved: cache (sqlite3.Connection): it is in a file" in out


def test_what_cannot_be_written_or_found_is_answered_in_one_line(
    run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [main(["report", run_dir, "-o", "/nowhere/r.html"]), main(["report", str(tmp_path / "none")])]

    lines = capsys.readouterr().err.splitlines()
    assert codes == [2, 2]
    assert (
        lines[0]
        == "ttprun: error: '/nowhere/r.html' cannot be written (No such file or directory); name another file with -o"
    )
    assert lines[1].startswith("ttprun: error: there is no run ")


def test_a_node_that_does_not_lead_does_not_say_where_the_time_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "hand", status_of(is_leading=False))

    main(["report", str(run.path), "--markdown"])

    assert "Where the time went is known to the node whose agent leads." in capsys.readouterr().out
    view = RunView(run)
    names = {metric.name for metric in RunCollector(lambda: view, StepTimes()).collect()}
    assert "ttprun_step" in names
    assert "ttprun_productive_seconds" not in names
