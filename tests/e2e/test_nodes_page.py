"""The page of a job on several nodes: any launcher leads to the one whose agent leads, and the lead takes it along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_nodes import at_gate, leading, start_gated
from tests.nodes import Nodes, why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
PORT = 8080
TOKEN = "a word that is long enough"
ASK = """
import json, sys, time, urllib.error, urllib.request
url, token, wanted = sys.argv[1:]
while True:
    try:
        asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
        answer = urllib.request.urlopen(asked, timeout=60)
        text = answer.read().decode()
        if answer.geturl().startswith(wanted) and json.loads(text)["pages"]:
            break
    except OSError:
        pass
    time.sleep(0.2)
print(text)
"""


def ask(nodes: Nodes, number: int, source: int) -> dict[str, Any]:
    """The status that who asks the launcher of a node gets from `source`, as soon as it is sent there.

    A page may be some seconds behind: its first status is from before the nodes had met.
    """
    url, wanted = (f"http://{nodes.addresses[one]}:{PORT}/" for one in (number, source))
    done = subprocess.run(
        [*nodes.inside(number), sys.executable, "-c", ASK, f"{url}api/status", TOKEN, wanted],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return dict(json.loads(done.stdout))


def test_a_node_leads_to_the_page_of_the_one_that_leads_and_shows_the_job_itself_when_that_is_lost(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    options = ["--http", f"0.0.0.0:{PORT}", "--http-token-file", str(token)]
    with Nodes(3) as nodes:
        launches = at_gate(nodes, range(2), tmp_path, options=options)
        spare = start_gated(nodes, 2, tmp_path, options=options)
        lead = leading(launches)
        launches[lead].wait_for_event("node_waits")

        before = ask(nodes, 1 - lead, source=lead)
        nodes.end_processes(lead)
        after = ask(nodes, 1 - lead, source=1 - lead)
        (tmp_path / "gate").touch()
        runs = [launch.finish() for launch in (launches[1 - lead], spare)]

    assert before["is_leading"]
    assert before["pages"] == [f"http://{nodes.addresses[number]}:{PORT}/" for number in (lead, 1 - lead)]
    assert (after["node"], after["leader"], after["is_leading"]) == (1, 1, True)
    assert [run.exit_code for run in runs] == [0, 0]
