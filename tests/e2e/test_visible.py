"""What is shown of a real run, and who is notified of it, while a rank of it is replaced."""

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ttprun.cli.main import main

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "while_true_get_batch.py"  # 40 steps
LIMIT_S = 120


def messages_of(port: int) -> Iterator[tuple[str, dict[str, object]]]:
    """(kind, data) of what a page is sent, until the server ends it."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as connection:
        connection.request("GET", "/api/events")
        kind = ""
        for line in connection.getresponse():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            kind = value if name == "event" else kind
            if name == "data":
                yield kind, json.loads(value)


def test_a_page_that_is_open_sees_a_rank_replaced_and_the_end_and_a_command_is_notified(tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    run_dir = tmp_path / "run"
    options = ["--http", ":0", "--on-event", f"cat >> {reported}", "--run-dir", str(run_dir), "--nproc-per-node", "2"]
    fault = ["--allow-faults", "--fault", "kill:rank=1,step=20,phase=backward"]
    with subprocess.Popen(
        [sys.executable, "-m", "ttprun", *options, *fault, str(SCRIPT)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        assert launcher.stderr is not None
        assert re.match(r"ttprun: run \S+: started", launcher.stderr.readline())
        second = launcher.stderr.readline()
        port = int(re.match(r"ttprun: http://127\.0\.0\.1:(\d+)/ shows this run \(read only\)", second)[1])  # type: ignore[index]
        messages = list(messages_of(port))
        launcher.stderr.read()
        code = launcher.wait(LIMIT_S)

    events = [data for kind, data in messages if kind == "event"]
    status = [data for kind, data in messages if kind == "status"][-1]
    assert code == 0
    assert [event["outcome"] for event in events if event["event"] == "incident"][-1] == "recovered"
    assert messages[-1][0] == "end"
    assert status["status"]["state"] == "done"  # type: ignore[index]
    assert status["summary"]["lost_s"]["recovery"] > 0  # type: ignore[index]
    assert [json.loads(line)["kind"] for line in reported.read_text().splitlines()] == ["incident_ended", "run_ended"]
    assert main(["report", str(run_dir), "-o", str(tmp_path / "report.html")]) == 0
